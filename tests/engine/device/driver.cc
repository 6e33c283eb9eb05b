// The part of NVIDIA's driver that tierstore calls, on host memory: a libcuda.so.1 for machines without a GPU.
//
// It is there to find mistakes in the order of asynchronous work. Work that is queued on a stream runs when
// somebody demands it, and in the order that is worst for the caller within what CUDA promises: items of one
// stream in order, a wait after the record that it captured, and nothing else. The seed chooses how:
//
//   0             lazy: only what an event that is waited for depends on, as late as possible
//   1             eager: everything that may run, at once, streams in random order
//   2, 4, 6, …    random: some of it, at any call
//   3, 5, 7, …    some streams lazy and the others eager
//
// A copy takes several steps: its destination is spoiled first, then its halves arrive in random order, beside
// those of the batch's other copies, and other streams may run in between. Copies with SRC_ACCESS_ORDER_ANY may
// read their source when they are called. So a missing wait, an event that is recorded too early and a page that
// is used again too early show as wrong bytes under one seed or another.
//
// Memory may be put behind reserved addresses and taken away again, in whole granules (small here). It is spoiled
// when it comes and when it goes, so whoever still works on it then reads or leaves wrong bytes; copies that touch
// addresses without memory, or memory without access, are counted too (fake_strays), and so are pieces that are
// taken away while a copy of them is under way. What is mapped twice, unmapped in other pieces than it was mapped in,
// or reserved and not empty when it is given back, is refused.
//
// Registered host memory must be mapped from before it is registered until after it is unregistered, and copies
// that need it registered must find it so until they have ended: what is not so is counted (fake_strays).
//
// There is one device, unless fake_devices says that there are more, which share a schedule and the memory. Each has a
// context of its own, and a stream is used in the context that it was made in. Other processes that have this
// driver can open memory by its handle.
//
// What computes is a function of the caller's, queued by fake_launch. What it queues on its own stream takes
// effect where it stands: it is what the stream is doing. cuda.h is included so that every signature here is the
// header's; only the old cuMemcpyBatchAsync is not, which the header hides behind _v2.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace {

constexpr unsigned char SPOILED = 0xA5;
using Callback = void (*)(long long);

struct FakeStream;

struct FakeEvent {
  long long recorded = 0, reached = 0;  // how often it was recorded, and the last of those that was reached
  FakeStream* stream = nullptr;
  bool destroyed = false;
};

struct Piece {
  unsigned char* to;
  const unsigned char* from;
  size_t bytes;
};

struct Item {
  enum Kind { COPY, RECORD, WAIT, CALL } kind;
  FakeEvent* event = nullptr;
  long long ticket = 0;  // of the event, or the caller's number of what to call
  Callback callback = nullptr;
  std::vector<Piece> copies, pieces;  // to spoil; left to do
  bool begun = false;
  std::vector<std::vector<unsigned char>> early;  // sources that were read ahead of time
};

struct FakeStream {
  std::deque<std::unique_ptr<Item>> items;
  bool busy = false, eager = false, destroyed = false;
  std::thread::id owner;
  CUcontext context = nullptr;
};

// What an IPC handle says: the file in which a process has the memory.
struct Shared {
  int pid, file;
  size_t bytes;
};

struct Driver {
  std::recursive_mutex mutex;
  std::mt19937_64 random{0};
  unsigned long long seed = 0;
  std::vector<std::unique_ptr<FakeStream>> streams;
  std::vector<std::unique_ptr<FakeEvent>> events;
  std::map<CUdeviceptr, size_t> allocated;
  std::map<CUdeviceptr, Shared> files;  // that the allocated memory is in
  std::set<CUdeviceptr> former;  // of those, memory of earlier tests' devices
  std::map<void*, size_t> registered;
  std::set<void*> formerly_registered;  // by earlier tests
  std::map<CUdeviceptr, size_t> reserved, backed;  // addresses; those that have memory
  std::map<CUdeviceptr, bool> accessible;          // of those, whether access was set
  std::map<unsigned long long, size_t> handles;    // of memory that has not been released
  unsigned long long last_handle = 0;
  size_t total = size_t(1) << 30, used = 0;
  size_t old_streams = 0;
  long long batches = 0, copies = 0, registrations = 0, strays = 0;
  bool refuses_registrations = false;
  bool batch_supported = true, maps = true;
  int devices = 1, device_contexts[8] = {};

  static bool mapped(void* memory, size_t bytes) { return msync(memory, bytes, MS_ASYNC) == 0; }

  template <typename Ranges>
  static bool within(const Ranges& ranges, const unsigned char* start, size_t bytes) {
    for (const auto& [at, size] : ranges) {
      const auto first = reinterpret_cast<const unsigned char*>(at);
      if (first <= start && start + bytes <= first + size) return true;
    }
    return false;
  }
  bool reached_by_engines(const unsigned char* start, size_t bytes) const {
    return within(allocated, start, bytes) || within(registered, start, bytes) || within(reserved, start, bytes);
  }
  // Whether these addresses are reserved and some of them have no memory, or none that may be touched.
  bool hollow(const unsigned char* start, size_t bytes) const {
    if (!within(reserved, start, 1)) return false;
    const auto end = reinterpret_cast<CUdeviceptr>(start) + bytes;
    auto at = reinterpret_cast<CUdeviceptr>(start);
    while (at < end) {
      auto piece = backed.upper_bound(at);
      if (piece == backed.begin()) return true;
      --piece;
      if (at >= piece->first + piece->second || !accessible.at(piece->first)) return true;
      at = piece->first + piece->second;
    }
    return false;
  }
  bool under_way(unsigned char* start, size_t bytes) const {
    const std::map<void*, size_t> range{{start, bytes}};
    for (auto& stream : streams)
      for (auto& item : stream->items)
        for (const Piece& copy : item->copies)
          if (within(range, copy.to, 1) || within(range, copy.from, 1)) return true;
    return false;
  }

  size_t below(size_t bound) { return random() % bound; }

  static bool reached(const Item& wait) { return wait.event->reached >= wait.ticket; }

  bool runnable(const FakeStream& stream) {
    if (stream.busy || stream.items.empty()) return false;
    const Item& next = *stream.items.front();
    return next.kind != Item::WAIT || reached(next);
  }

  // One step of a stream's next item, which may take several.
  void advance(FakeStream& stream) {
    Item& item = *stream.items.front();
    stream.busy = true;
    stream.owner = std::this_thread::get_id();
    const bool done = step(item);
    stream.busy = false;
    if (done) stream.items.pop_front();
  }

  bool step(Item& item) {
    switch (item.kind) {
      case Item::RECORD:
        if (item.event->reached < item.ticket) item.event->reached = item.ticket;
        return true;
      case Item::WAIT:
        return true;
      case Item::CALL:
        item.callback(item.ticket);
        return true;
      case Item::COPY:
        if (!item.begun) {
          item.begun = true;
          for (const Piece& copy : item.copies) memset(copy.to, SPOILED, copy.bytes);
          return item.pieces.empty();
        }
        const size_t which = below(item.pieces.size());
        const Piece piece = item.pieces[which];
        item.pieces[which] = item.pieces.back();
        item.pieces.pop_back();
        strays += hollow(piece.to, piece.bytes) || hollow(piece.from, piece.bytes);
        memcpy(piece.to, piece.from, piece.bytes);
        return item.pieces.empty();
    }
    return true;
  }

  bool any_step(bool eager_only) {
    std::vector<FakeStream*> ready;
    for (auto& stream : streams)
      if (runnable(*stream) && (stream->eager || !eager_only)) ready.push_back(stream.get());
    if (ready.empty()) return false;
    advance(*ready[below(ready.size())]);
    return true;
  }

  // The least that brings `stream` forward by a step. False where that cannot be.
  bool needed_step(FakeStream* stream, int depth = 0) {
    if (stream == nullptr || stream->busy || stream->items.empty() || depth > 64) return false;
    if (runnable(*stream)) {
      advance(*stream);
      return true;
    }
    return needed_step(stream->items.front()->event->stream, depth + 1);
  }

  bool is_random() const { return seed > 1 && seed % 2 == 0; }

  // Whether a new stream, the `index`th, is eager.
  bool eager(size_t index) const {
    constexpr unsigned PATTERNS[] = {0b1110, 0b0001, 0b0010, 0b1100, 0b1010, 0b0101};
    return seed == 1 || (seed > 1 && seed % 2 == 1 && PATTERNS[seed / 2 % 6] >> index % 4 & 1);
  }

  bool progress(FakeStream* wanted) {
    if (!(is_random() ? any_step(false) : needed_step(wanted))) return false;
    drift();
    return true;
  }

  // After every call: what the schedule lets happen by itself.
  void drift() {
    if (is_random())
      for (size_t steps = below(4); steps > 0 && any_step(false); steps--) {
      }
    else
      while (any_step(true)) {
      }
  }

  CUresult until(FakeEvent* event, long long ticket) {
    while (event->reached < ticket)
      if (!progress(event->stream)) return CUDA_ERROR_LAUNCH_TIMEOUT;  // it can never be reached
    return CUDA_SUCCESS;
  }

  CUresult queue(FakeStream* stream, std::unique_ptr<Item> item) {
    if (stream->busy && stream->owner == std::this_thread::get_id()) {  // called by what it computes
      if (item->kind == Item::WAIT) return until(item->event, item->ticket);
      while (!step(*item)) {
      }
      return CUDA_SUCCESS;
    }
    stream->items.push_back(std::move(item));
    drift();
    return CUDA_SUCCESS;
  }

  std::unique_ptr<Item> copy(const std::vector<Piece>& wanted, bool any_order) {
    auto item = std::make_unique<Item>();
    item->kind = Item::COPY;
    for (Piece piece : wanted) {
      item->copies.push_back(piece);
      if (any_order && below(2)) {
        item->early.emplace_back(piece.from, piece.from + piece.bytes);
        piece.from = item->early.back().data();
      }
      const size_t half = piece.bytes / 2;
      item->pieces.push_back({piece.to, piece.from, half});
      item->pieces.push_back({piece.to + half, piece.from + half, piece.bytes - half});
    }
    return item;
  }
};

Driver driver;

FakeStream* stream_of(CUstream stream) { return reinterpret_cast<FakeStream*>(stream); }
// Handles are never used again, so one that was destroyed is known for what it is.
#define NEEDS_STREAM(stream) \
  if (stream_of(stream)->destroyed) return CUDA_ERROR_INVALID_HANDLE; \
  if (stream_of(stream)->context != contexts.back()) return CUDA_ERROR_INVALID_CONTEXT
FakeEvent* event_of(CUevent event) { return reinterpret_cast<FakeEvent*>(event); }
using Guard = std::lock_guard<std::recursive_mutex>;

}  // namespace

extern "C" {

CUresult cuInit(unsigned int) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return 0 <= ordinal && ordinal < driver.devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute != CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED || driver.maps;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(&driver.device_contexts[device]);
  return CUDA_SUCCESS;
}
// A thread whose current context is not the device's is refused, as it would be.
thread_local std::vector<CUcontext> contexts;
CUresult cuCtxPushCurrent(CUcontext context) {
  contexts.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}
#define NEEDS_CONTEXT \
  Guard guard(driver.mutex); \
  if (contexts.empty() || contexts.back() < reinterpret_cast<CUcontext>(driver.device_contexts) || \
      contexts.back() >= reinterpret_cast<CUcontext>(std::end(driver.device_contexts))) \
  return CUDA_ERROR_INVALID_CONTEXT

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_OUT_OF_MEMORY    ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == CUDA_ERROR_LAUNCH_TIMEOUT ? "CUDA_ERROR_LAUNCH_TIMEOUT"
          : error == CUDA_ERROR_INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE"
                                               : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t* free_bytes, size_t* total) {
  NEEDS_CONTEXT;
  *free_bytes = driver.total - driver.used;
  *total = driver.total;
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  NEEDS_CONTEXT;
  if (bytes > driver.total - driver.used) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = memfd_create("tests-device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  memset(memory, SPOILED, bytes);
  *address = reinterpret_cast<CUdeviceptr>(memory);
  driver.files[*address] = {getpid(), file, bytes};
  driver.allocated[*address] = bytes;
  driver.used += bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
  NEEDS_CONTEXT;
  const auto found = driver.allocated.find(address);
  if (found == driver.allocated.end()) return CUDA_ERROR_INVALID_VALUE;
  if (!driver.former.erase(address))
    while (driver.any_step(false)) {  // it waits for the device
    }
  driver.used -= found->second;
  munmap(reinterpret_cast<void*>(address), found->second);
  driver.allocated.erase(found);
  close(driver.files[address].file);
  driver.files.erase(address);
  return CUDA_SUCCESS;
}
constexpr size_t GRANULE = 8192;

static bool of_device(const CUmemAllocationProp* wanted) {
  return wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED && wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE &&
         wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE && wanted->location.id < driver.devices && !wanted->win32HandleMetaData &&
         !wanted->allocFlags.compressionType && !wanted->allocFlags.gpuDirectRDMACapable && !wanted->allocFlags.usage;
}
CUresult cuMemGetAllocationGranularity(size_t* granule, const CUmemAllocationProp* wanted, CUmemAllocationGranularity_flags) {
  NEEDS_CONTEXT;
  *granule = GRANULE;
  return of_device(wanted) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long flags) {
  NEEDS_CONTEXT;
  if (!bytes || bytes % GRANULE || flags) return CUDA_ERROR_INVALID_VALUE;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(memory);
  driver.reserved[*address] = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  NEEDS_CONTEXT;
  const auto found = driver.reserved.find(address);
  if (found == driver.reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [at, size] : driver.backed)
    if (at >= address && at < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  driver.strays += driver.under_way(reinterpret_cast<unsigned char*>(address), bytes);
  munmap(reinterpret_cast<void*>(address), bytes);
  driver.reserved.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* wanted, unsigned long long flags) {
  NEEDS_CONTEXT;
  if (!bytes || bytes % GRANULE || flags || !of_device(wanted)) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > driver.total - driver.used) return CUDA_ERROR_OUT_OF_MEMORY;
  driver.used += bytes;
  *handle = ++driver.last_handle;
  driver.handles[*handle] = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  NEEDS_CONTEXT;
  const auto found = driver.handles.find(handle);
  auto* start = reinterpret_cast<unsigned char*>(address);
  if (found == driver.handles.end() || found->second != bytes || offset || flags || address % GRANULE % 4096 ||
      !Driver::within(driver.reserved, start, bytes))
    return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [at, size] : driver.backed)
    if (at < address + bytes && address < at + size) return CUDA_ERROR_INVALID_VALUE;  // it is mapped already
  driver.backed[address] = bytes;
  driver.accessible[address] = false;
  found->second = 0;  // the mapping has it from now on
  memset(start, SPOILED, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  NEEDS_CONTEXT;
  const auto found = driver.backed.find(address);
  if (found == driver.backed.end() || found->second != bytes || count != 1) return CUDA_ERROR_INVALID_VALUE;
  if (access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || access->location.id || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    return CUDA_ERROR_INVALID_VALUE;
  driver.accessible[address] = true;
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {  // it does not wait
  NEEDS_CONTEXT;
  const auto found = driver.backed.find(address);
  if (found == driver.backed.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  auto* start = reinterpret_cast<unsigned char*>(address);
  driver.strays += driver.under_way(start, bytes);
  memset(start, SPOILED, bytes);
  driver.used -= bytes;
  driver.backed.erase(found);
  driver.accessible.erase(address);
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  NEEDS_CONTEXT;
  const auto found = driver.handles.find(handle);
  if (found == driver.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  driver.used -= found->second;  // if it was never mapped
  driver.handles.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuMemHostRegister(void* memory, size_t bytes, unsigned int) {
  NEEDS_CONTEXT;
  if (driver.refuses_registrations) return CUDA_ERROR_OUT_OF_MEMORY;
  if (driver.registered.count(memory)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  driver.registered[memory] = bytes;
  driver.formerly_registered.erase(memory);
  driver.registrations++;
  driver.strays += !Driver::mapped(memory, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void* memory) {
  NEEDS_CONTEXT;
  const auto found = driver.registered.find(memory);
  if (found == driver.registered.end())  // an earlier test's attention may be collected at any time
    return driver.formerly_registered.erase(memory) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  driver.strays += !Driver::mapped(memory, found->second);
  driver.strays += driver.under_way(static_cast<unsigned char*>(memory), found->second);
  driver.registered.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  NEEDS_CONTEXT;
  if (!driver.allocated.count(address)) return CUDA_ERROR_INVALID_VALUE;
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &driver.files[address], sizeof(Shared));
  return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned int flags) {
  NEEDS_CONTEXT;
  Shared shared;
  memcpy(&shared, &handle, sizeof shared);
  if (shared.pid == getpid() || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.pid, shared.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return CUDA_ERROR_INVALID_VALUE;
  void* memory = mmap(nullptr, shared.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int, int) {
  NEEDS_CONTEXT;
  driver.streams.push_back(std::make_unique<FakeStream>());
  driver.streams.back()->context = contexts.back();
  driver.streams.back()->eager = driver.eager(driver.streams.size() - 1 - driver.old_streams);
  *stream = reinterpret_cast<CUstream>(driver.streams.back().get());
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {  // what is on it still happens
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  stream_of(stream)->destroyed = true;
  return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  auto item = std::make_unique<Item>();
  item->kind = Item::WAIT;
  item->event = event_of(event);
  item->ticket = item->event->recorded;
  return driver.queue(stream_of(stream), std::move(item));
}

CUresult cuEventCreate(CUevent* event, unsigned int) {
  NEEDS_CONTEXT;
  driver.events.push_back(std::make_unique<FakeEvent>());
  *event = reinterpret_cast<CUevent>(driver.events.back().get());
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {  // waits that captured it go on
  NEEDS_CONTEXT;
  event_of(event)->destroyed = true;
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  auto item = std::make_unique<Item>();
  item->kind = Item::RECORD;
  item->event = event_of(event);
  if (item->event->destroyed) return CUDA_ERROR_INVALID_HANDLE;
  item->ticket = ++item->event->recorded;
  item->event->stream = stream_of(stream);
  return driver.queue(stream_of(stream), std::move(item));
}
CUresult cuEventQuery(CUevent event) {
  NEEDS_CONTEXT;
  if (event_of(event)->destroyed) return CUDA_ERROR_INVALID_HANDLE;
  driver.drift();
  return event_of(event)->reached >= event_of(event)->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuEventSynchronize(CUevent event) {
  NEEDS_CONTEXT;
  if (event_of(event)->destroyed) return CUDA_ERROR_INVALID_HANDLE;
  return driver.until(event_of(event), event_of(event)->recorded);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  driver.copies++;
  const Piece piece{reinterpret_cast<unsigned char*>(to), reinterpret_cast<const unsigned char*>(from), bytes};
  return driver.queue(stream_of(stream), driver.copy({piece}, false));
}
static CUresult copy_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                           CUmemcpyAttributes* attributes, size_t* attribute_indexes, size_t attribute_count,
                           CUstream stream) {
  NEEDS_CONTEXT;
  if (!driver.batch_supported) return CUDA_ERROR_NOT_SUPPORTED;
  if (stream == nullptr || attribute_count != 1 || attribute_indexes[0] != 0 || count == 0) return CUDA_ERROR_INVALID_VALUE;
  NEEDS_STREAM(stream);
  const auto order = attributes[0].srcAccessOrder;
  if (order != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && order != CU_MEMCPY_SRC_ACCESS_ORDER_ANY) return CUDA_ERROR_INVALID_VALUE;
  // What lies behind the order in the caller's structure, and should be there as cuda.h has it.
  if (attributes[0].flags != CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) return CUDA_ERROR_INVALID_VALUE;
  if (attributes[0].srcLocHint.type || attributes[0].dstLocHint.type) return CUDA_ERROR_INVALID_VALUE;
  driver.batches++;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < count; i++)
    pieces.push_back({reinterpret_cast<unsigned char*>(to[i]), reinterpret_cast<const unsigned char*>(from[i]), bytes[i]});
  for (const Piece& piece : pieces)
    driver.strays += !driver.reached_by_engines(piece.to, piece.bytes) || !driver.reached_by_engines(piece.from, piece.bytes);
  return driver.queue(stream_of(stream), driver.copy(pieces, order == CU_MEMCPY_SRC_ACCESS_ORDER_ANY));
}
CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, CUmemcpyAttributes* attributes,
                            size_t* attribute_indexes, size_t attribute_count, CUstream stream) {  // in fact _v2
  return copy_batch(to, from, bytes, count, attributes, attribute_indexes, attribute_count, stream);
}
#undef cuMemcpyBatchAsync
// Nine arguments: the symbol without a suffix is that of CUDA 12.8 in every later driver too.
CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, CUmemcpyAttributes* attributes,
                            size_t* attribute_indexes, size_t attribute_count, size_t* fail_index, CUstream stream) {
  *fail_index = 0;
  return copy_batch(to, from, bytes, count, attributes, attribute_indexes, attribute_count, stream);
}

// -- what no driver has -------------------------------------------------------------------------------------

void fake_reset(unsigned long long seed, size_t total_bytes, int batch_supported) {
  Guard guard(driver.mutex);
  for (auto& stream : driver.streams) stream->items.clear();
  // An earlier test's pool may be collected at any time. That must not complete this test's work.
  for (const auto& [address, size] : driver.allocated) driver.former.insert(address);
  driver.old_streams = driver.streams.size();
  driver.seed = seed;
  driver.random.seed(seed);
  driver.total = driver.used + total_bytes;
  driver.batch_supported = batch_supported != 0;
  driver.batches = driver.copies = driver.registrations = driver.strays = 0;
  driver.refuses_registrations = false;
  for (const auto& [memory, size] : driver.registered) driver.formerly_registered.insert(memory);
  driver.registered.clear();
  driver.maps = true;
  driver.devices = 1;
}
CUresult fake_launch(CUstream stream, Callback callback, long long number) {
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  auto item = std::make_unique<Item>();
  item->kind = Item::CALL;
  item->callback = callback;
  item->ticket = number;
  return driver.queue(stream_of(stream), std::move(item));
}
void fake_devices(int count) { driver.devices = count; }
void fake_cannot_map() { driver.maps = false; }
size_t fake_mapped() {
  size_t bytes = 0;
  for (const auto& [at, size] : driver.backed) bytes += size;
  return bytes;
}
size_t fake_handles() { return driver.handles.size(); }
size_t fake_reserved() { return driver.reserved.size(); }
long long fake_batches() { return driver.batches; }
long long fake_copies() { return driver.copies; }
size_t fake_streams() {
  size_t count = 0;
  for (auto& stream : driver.streams) count += !stream->destroyed;
  return count;
}
size_t fake_registered() { return driver.registered.size(); }
long long fake_registrations() { return driver.registrations; }
long long fake_strays() { return driver.strays; }
void fake_refuse_registrations() { driver.refuses_registrations = true; }
}
