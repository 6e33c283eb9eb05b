// The causal convolution before a recurrent state (states.cuh), and the inputs that it keeps for later tokens.
#include <ptx.cuh>

#include "numbers.cuh"
#include "states.cuh"

// SiLU of the convolution, every step rounded to T. grid (ceil(channels / 256), sequences), block 256: one thread per
// channel.
template <class T, int WIDTH>
__global__ void __launch_bounds__(256)
    convolve(const T* __restrict__ inputs, int row_step,  // [tokens, channels], rows row_step apart
             const T* __restrict__ weights,               // [channels, WIDTH]
             const T* __restrict__ biases,                // [channels], or null
             const int* __restrict__ rows, const int* __restrict__ counts, const int* __restrict__ lengths,
             const int* __restrict__ drafts,  // or null
             const int* __restrict__ pages, int page_step,  // a sequence's page is pages[sequence * page_step]
             unsigned char* __restrict__ pool, long long page_stride, long long offset,  // in bytes
             T* __restrict__ out,                                                        // [tokens, channels]
             int channels) {
  const int channel = blockIdx.x * 256 + threadIdx.x, sequence = blockIdx.y;
  const Spans span(rows, counts, lengths, drafts, sequence);
  if (channel >= channels || span.count == 0) return;
  T* const kept = in_page<T>(pool, pages[sequence * page_step], page_stride, offset) +
                  static_cast<long long>(channel) * (WIDTH - 1);
  float window[WIDTH], weight[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; i++) weight[i] = Numbers<T>::widen(weights[channel * WIDTH + i]);
#pragma unroll
  for (int i = 0; i < WIDTH - 1; i++) window[i] = span.begins ? 0.f : Numbers<T>::widen(kept[i]);
  const float bias = biases != nullptr ? Numbers<T>::widen(biases[channel]) : 0.f;
  for (int token = 0; token < span.count; token++) {
    const long long row = span.row + token;
    window[WIDTH - 1] = Numbers<T>::widen(inputs[row * row_step + channel]);
    float sum = bias;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sum += window[i] * weight[i];
    const float rounded = Numbers<T>::widen(Numbers<T>::narrow(sum));
    out[row * channels + channel] = Numbers<T>::narrow(rounded / (1.f + ptx::exp2_approx(-rounded * LOG2_E)));
#pragma unroll
    for (int i = 0; i < WIDTH - 1; i++) window[i] = window[i + 1];
    if (token + 1 != span.certain) continue;
#pragma unroll
    for (int i = 0; i < WIDTH - 1; i++) kept[i] = Numbers<T>::narrow(window[i]);
  }
}
