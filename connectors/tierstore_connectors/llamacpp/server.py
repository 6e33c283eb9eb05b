"""The process of a running llama-server, and a digest of everything in it that changes KV.

llama-server reports neither its RoPE settings nor the types of its KV cache. So this module reads the
arguments, environment and loaded libraries of the process that listens at the server's address. Reading them
requires the same host, the same user and a common process namespace.

Every argument is part of the digest unless :data:`HARMLESS` lists it, including arguments that a later
llama.cpp adds. If an argument names a file, the file's contents are part of the digest.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import UsageError
from tierstore_connectors.common.contents import contents, default_cache
from tierstore_connectors.common.facts import digest, host_device, words

HARMLESS: frozenset[str] = frozenset().union(
    # Addresses, access rights, logs and metrics.
    words("""
        --host --port --reuse-port --path --cors-origins --cors-methods --cors-headers
        --cors-credentials --no-cors-credentials --api-prefix --api-key --api-key-file
        --ssl-key-file --ssl-cert-file -to --timeout --sse-ping-interval --threads-http --metrics
        --props --slots --slot-save-path --ui --webui --no-ui --no-webui --ui-config --webui-config
        --ui-config-file --webui-config-file -a --alias --tags --offline --log-disable --log-file
        --log-jsonl --no-log-jsonl --log-prompts-dir --log-colors -v --verbose --log-verbose -lv
        --verbosity --log-verbosity --log-prefix --no-log-prefix --log-timestamps
        --no-log-timestamps --perf --no-perf --warmup --no-warmup --sleep-idle-seconds --media-path
    """),
    # Batching of requests, threads, and the server's own prompt cache.
    words("""
        -t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll
        -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch
        --numa -np --parallel -cb --cont-batching -nocb --no-cont-batching -kvu --kv-unified -no-kvu
        --no-kv-unified -cram --cache-ram --cache-idle-slots --no-cache-idle-slots -ctxcp
        --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -sps --slot-prompt-similarity
        --cache-prompt -dt --defrag-thold --check-tensors -lm --load-mode --mmap --no-mmap --mlock
        --no-context-shift
    """),
    # Conversions from text to tokens and from logits to text, because pages are found by tokens.
    words("""
        -n --predict --n-predict --keep -e --escape --no-escape -r --reverse-prompt -sp --special
        --spm-infill --samplers -s --seed --sampler-seq --sampling-seq --ignore-eos --temp
        --temperature --top-k --top-p --min-p --top-nsigma --top-n-sigma --xtc-probability
        --xtc-threshold --typical --typical-p --repeat-last-n --repeat-penalty --presence-penalty
        --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n
        --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp
        --mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file -j
        --json-schema -jf --json-schema-file -bs --backend-sampling --jinja --no-jinja
        --chat-template --chat-template-file --chat-template-kwargs --reasoning-format -rea
        --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message
        --reasoning-preserve --no-reasoning-preserve --skip-chat-parsing --no-skip-chat-parsing
        --prefill-assistant --no-prefill-assistant
    """),
)
"""The arguments of llama-server that are known not to change the KV of a token sequence."""

# These give the location of the weights, which are part of the identity by their contents.
_ELSEWHERE = words("""
    -m --model -mu --model-url -hf -hfr --hf-repo -hff --hf-file -hft --hf-token -dr --docker-repo
""")

_UNSUPPORTED = {
    "--context-shift": "cells of the KV cache move to other positions",
    "--cache-reuse": "cells of the KV cache move to other positions",
    "-gan": "cells of the KV cache move to other positions",
    "--grp-attn-n": "cells of the KV cache move to other positions",
    "--lora": "an adapter's scale can change at any time",
    "--lora-scaled": "an adapter's scale can change at any time",
    "--swa-full": "llama-server then continues sequences with incomplete windows",
    "--no-slots": "the server then does not report which slots are in use",
    "--no-cache-prompt": "the server then does not continue a restored prompt",
    "--models-dir": "a router has no model of its own",
    "--models-preset": "a router has no model of its own",
}
_OFF = ("0", "false", "off", "disabled")
_ONE_IS_OFF = ("-gan", "--grp-attn-n")

_ENVIRONMENT = re.compile(r"LLAMA_(?!ARG_|API_KEY|CACHE|LOG)|GGML_|CUDA_|HIP_|ROCR_|HSA_|VK_|OMP_PROC")
_LIBRARY = re.compile(r"/lib(?:llama|ggml)[^/]*\.so")
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_STARTED_SLACK_S = 2.0  # the boot time is known to a second only


@dataclass(frozen=True)
class LlamaProcess:
    """The process of a llama-server. ``started`` is the process's start in clock ticks since the machine's
    boot: ``pid`` and ``started`` together identify the process."""

    pid: int
    started: int
    arguments: tuple[tuple[str, ...], ...]
    environment: tuple[str, ...]
    folder: Path

    @classmethod
    def listening_at(cls, host: str, port: int) -> LlamaProcess:
        """Return the process that listens at ``host:port``. Raise :class:`UsageError` if the process is not
        visible or readable."""
        inodes = set(_listening(port))
        pid = next((pid for pid in _pids() if inodes and _has_socket(pid, inodes)), None)
        if pid is None:
            raise UsageError(
                f"the process that listens at {host}:{port} cannot be seen: run this on the same host, as "
                "the same user and in the same process namespace as llama-server"
            )
        try:
            return cls.of(pid)
        except OSError as error:
            raise UsageError(f"process {pid} at port {port} cannot be read: {error.strerror}") from error

    @classmethod
    def of(cls, pid: int) -> LlamaProcess:
        """Return the process ``pid``. Raise :class:`OSError` if the process cannot be read."""
        place = Path(f"/proc/{pid}")
        command = place.joinpath("cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[1:-1]
        variables = place.joinpath("environ").read_bytes().decode(errors="surrogateescape").split("\0")
        arguments = [*_arguments(command), *_arguments_of_environment(variables)]
        return cls(
            pid,
            _started(pid),
            tuple(sorted(arguments)),
            tuple(sorted(each for each in variables if _ENVIRONMENT.match(each))),
            Path(os.readlink(place / "cwd")),
        )

    @property
    def alive(self) -> bool:
        """Return whether this process still runs."""
        try:
            return _started(self.pid) == self.started
        except (OSError, ValueError):
            return False

    def value(self, *names: str) -> str | None:
        """Return the value of an argument with one of ``names``; None without the argument, "" without a
        value."""
        for name, *values in self.arguments:
            if name in names:
                return values[0] if values else ""
        return None

    def path(self, name: str) -> Path:
        """Return a path relative to the process's working directory."""
        return self.folder / name

    @property
    def slot_folder(self) -> Path:
        """Return the folder of slot files. Raise :class:`UsageError` if the server has no
        --slot-save-path."""
        given = self.value("--slot-save-path")
        if not given:
            raise UsageError("llama-server needs --slot-save-path DIR (best in memory: /dev/shm/NAME)")
        return self.path(given)

    def require_supported(self) -> None:
        """Raise :class:`UsageError` for an argument that is not supported."""
        for name, *values in self.arguments:
            why = _UNSUPPORTED.get(name)
            off = bool(values) and (values[0] in _OFF or (name in _ONE_IS_OFF and values[0] == "1"))
            if why and not off:
                raise UsageError(f"llama-server runs with {name}, which is not supported: {why}")

    def weights(self, model: Path) -> str:
        """Return a digest of the contents of the model's files. Raise :class:`UsageError` if a file cannot be
        read, or has changed since the process was started."""
        model = self.path(str(model))
        files = split_files(model)
        began = _boot_time() + self.started / os.sysconf("SC_CLK_TCK")
        try:
            for file in files:
                if file.stat().st_ctime > began + _STARTED_SLACK_S:
                    raise UsageError(f"{file} has changed since llama-server was started: start it again")
            return weights_digest(files)
        except OSError as error:
            raise UsageError(f"the model's file cannot be read: {error}") from error

    def engine(self, facts: Sequence[object]) -> str:
        """Return a digest of everything except the weights: arguments, environment, libraries, processor and
        ``facts``. Raise :class:`UsageError` if the libraries cannot be read."""
        program = Path(os.path.realpath(f"/proc/{self.pid}/exe"))
        built = libraries(self.pid, program)
        return digest([built, host_device(), self._counted_arguments(), self.environment, *facts])

    def _counted_arguments(self) -> list[tuple[str, ...]]:
        known = HARMLESS | _ELSEWHERE
        return [(name, *map(self._counted, values)) for name, *values in self.arguments if name not in known]

    def _counted(self, value: str) -> str:
        """Return an argument's value. If the value is a file's path, return the digest of its contents."""
        file = self.path(value)
        if not file.is_file():
            return value
        return contents({"": file}, remembered=default_cache()).digest


def libraries(pid: int, *programs: Path) -> str:
    """Return a digest of ``programs`` and of the llama.cpp libraries that a process has loaded. Raise
    :class:`UsageError` if a file cannot be read.

    The libraries are read below ``/proc/PID/root``, because the process may run in a container.
    """
    place = Path(f"/proc/{pid}")
    try:
        lines = place.joinpath("maps").read_text(errors="replace").splitlines()
        loaded = sorted({line.split(maxsplit=5)[-1] for line in lines if _LIBRARY.search(line)})
        found = [*programs, *(place / "root" / path.lstrip("/") for path in loaded)]
        return contents({path.name: path for path in found}, remembered=default_cache()).digest
    except OSError as error:
        raise UsageError(f"the libraries of process {pid} cannot be read: {error}") from error


def weights_digest(files: Sequence[Path]) -> str:
    """Return a digest of the contents of a model's files, in order. Raise :class:`OSError` if a file cannot
    be read."""
    return contents({f"{at:05}": file for at, file in enumerate(files)}, remembered=default_cache()).digest


def split_files(model: Path) -> list[Path]:
    """Return the files of a GGUF model, which may be split into ``NAME-00001-of-00003.gguf`` and so on."""
    found = _SPLIT.search(model.name)
    if not found:
        return [model]
    stem, count = model.name[: found.start()], int(found[1])
    return [model.with_name(f"{stem}-{at:05}-of-{found[1]}.gguf") for at in range(1, count + 1)]


def _arguments(command: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Divide a command line into arguments with their values.

    >>> list(_arguments(["-m", "a.gguf", "--temp", "-1", "--jinja"]))
    [('-m', 'a.gguf'), ('--temp', '-1'), ('--jinja',)]
    """
    current: list[str] = []
    for word in command:
        if re.match(r"--?[a-zA-Z]", word):
            if current:
                yield tuple(current)
            current = [word]
        else:
            current.append(word)
    if current:
        yield tuple(current)


def _arguments_of_environment(variables: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return environment variables as arguments: ``LLAMA_ARG_CTX_SIZE=4096`` as ``--ctx-size 4096``."""
    for each in variables:
        name, _, value = each.partition("=")
        if name.startswith("LLAMA_ARG_"):
            flag = "--" + name.removeprefix("LLAMA_ARG_").lower().replace("_", "-")
            yield (flag,) if value.lower() in ("1", "true", "on", "enabled") else (flag, value)


def _listening(port: int) -> Iterator[str]:
    """Return the inodes of the sockets that listen at ``port``."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _pids() -> Iterator[int]:
    return (int(each) for each in os.listdir("/proc") if each.isdecimal())


def _has_socket(pid: int, inodes: set[str]) -> bool:
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            if link.startswith("socket:[") and link[8:-1] in inodes:
                return True
    except OSError:
        pass  # the process has ended, or belongs to another user
    return False


def _started(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        raise ValueError("the process has ended")
    return int(fields[19])


def _boot_time() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
