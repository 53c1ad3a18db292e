// What the routed experts quantise is computed while it is quantised: gathered rows times their routing weight,
// SwiGLU, and SwiGLU's gradient. The BF16 roundings between the steps are those of torch's own operators.
//
// SiLU and its derivative start from a table of sigmoids over all 65,536 BF16 patterns.
#include "mx_quantize.h"

namespace quaver {

constexpr int PIECE = 256;  // elements of a row at a time, where there is something in between

struct Inputs {
  int kind;              // of the sources below
  const bf16* a;         // scaled rows: g [*, cols]; SwiGLU: h [rows, 2 cols]; its gradient: da [rows, cols / 2]
  const bf16* b;         // gradient: h [rows, cols]
  const int64_t* index;  // scaled rows: which row of `a` each row is
  const float* weight;   // scaled rows: factor of each row
  const float* sigmoid;  // of all BF16 patterns
  int64_t cols;          // of the result
  int fused;             // see `rest`
};

// row r = bf16(g[index[r]] * weight[r])
struct ScaledRows {
  static constexpr bool computed = true;
  Inputs in;
  INLINE const bf16* row(int64_t r, int64_t first, int width, bf16* __restrict out) const {
    const bf16* __restrict g = in.a + in.index[r] * in.cols + first;
    const float weight = in.weight[r];
    for (int j = 0; j < width; j++) out[j] = bf16_of_float(float_of_bf16(g[j]) * weight);
    return out;
  }
  INLINE void fetch(int64_t r, int64_t c) const { fetch_block(in.a + in.index[r] * in.cols + c); }
};

// Four indices in one load and four floats in one store: twice as fast as one by one, and faster than gathering.
static INLINE void look_up(const bf16* __restrict x, int n, const float* __restrict table, float* __restrict out) {
  typedef float lanes __attribute__((vector_size(16)));
  int j = 0;
  for (; j + 4 <= n; j += 4) {
    bf16 at[4];
    std::memcpy(at, x + j, sizeof(at));
    const lanes found = {table[at[0]], table[at[1]], table[at[2]], table[at[3]]};
    std::memcpy(out + j, &found, sizeof(found));
  }
  for (; j < n; j++) out[j] = table[x[j]];
}

// torch's silu_backward is dy * sigmoid(x) * rest, multiplied from left to right, rest = 1 + x * (1 - sigmoid(x)): with
// two roundings, or where its compiler fused multiply and add with one.
static INLINE float rest(float x, float sigmoid, bool fused) {
  return fused ? __builtin_fmaf(x, 1.0f - sigmoid, 1.0f) : 1.0f + x * (1.0f - sigmoid);
}

// FP32 -> BF16 in the upper half, round to nearest even. What is NaN here came out of BF16: its lower half is zero, no
// carry leaves it, and NaN it stays.
static INLINE uint32_t round_up(float value) {
  const uint32_t word = word_of(value);
  return word + 0x7fffu + ((word >> 16) & 1u);
}
static INLINE float rounded(float value) { return float_of(round_up(value) & 0xffff0000u); }
static INLINE bf16 rounded_bits(float value) { return (bf16)(round_up(value) >> 16); }

// row r = bf16(silu(gate) * up), gate and up being the halves of h's row
struct SwiGLU {
  static constexpr bool computed = true;
  Inputs in;
  INLINE const bf16* row(int64_t r, int64_t first, int width, bf16* __restrict out) const {
    const bf16* gate = in.a + r * 2 * in.cols + first;
    for (int j = 0; j < width; j += PIECE) piece(gate + j, gate + in.cols + j, std::min(PIECE, width - j), out + j);
    return out;
  }
  INLINE void fetch(int64_t r, int64_t c) const {
    fetch_block(in.a + r * 2 * in.cols + c);
    fetch_block(in.a + r * 2 * in.cols + in.cols + c);
  }
  INLINE void piece(const bf16* __restrict gate, const bf16* __restrict up, int n, bf16* __restrict out) const {
    float sigmoid[PIECE];
    look_up(gate, n, in.sigmoid, sigmoid);
    for (int j = 0; j < n; j++)
      out[j] = rounded_bits(rounded(float_of_bf16(gate[j]) * sigmoid[j]) * float_of_bf16(up[j]));
  }
};

// row r = [bf16(bf16(da * up) * slope(gate)), bf16(da * silu(gate))]
struct SwiGLUGradient {
  static constexpr bool computed = true;
  Inputs in;
  INLINE const bf16* row(int64_t r, int64_t first, int width, bf16* __restrict out) const {
    const int64_t half = in.cols / 2;
    const bf16 *da = in.a + r * half, *gate = in.b + r * in.cols;
    if (width == in.cols) {  // both halves at one look-up
      for (int64_t j = 0; j < half; j += PIECE)
        piece(da + j, gate + j, (int)std::min<int64_t>(PIECE, half - j), out + j, out + half + j);
      return out;
    }
    const int left = (int)std::max<int64_t>(0, std::min<int64_t>(width, half - first));
    for (int j = 0; j < left; j += PIECE)
      piece(da + first + j, gate + first + j, std::min(PIECE, left - j), out + j, nullptr);
    for (int j = left; j < width; j += PIECE) {
      const int64_t at = first + j - half;
      piece(da + at, gate + at, std::min(PIECE, width - j), nullptr, out + j);
    }
    return out;
  }
  INLINE void fetch(int64_t r, int64_t c) const {
    const int64_t half = in.cols / 2;
    fetch_block(in.b + r * in.cols + c);
    fetch_block(in.a + r * half + (c < half ? c : c - half));
  }
  INLINE void piece(const bf16* __restrict da, const bf16* __restrict gate, int n, bf16* __restrict to_gate,
                    bf16* __restrict to_up) const {
    const bf16* __restrict up = gate + in.cols / 2;
    float sigmoid[PIECE];
    look_up(gate, n, in.sigmoid, sigmoid);
    if (to_gate && in.fused)
      slope(da, gate, up, sigmoid, n, true, to_gate);
    else if (to_gate)
      slope(da, gate, up, sigmoid, n, false, to_gate);
    if (to_up)
      for (int j = 0; j < n; j++) {
        const float silu = rounded(float_of_bf16(gate[j]) * sigmoid[j]);
        to_up[j] = rounded_bits(silu * float_of_bf16(da[j]));
      }
  }
  INLINE void slope(const bf16* __restrict da, const bf16* __restrict gate, const bf16* __restrict up,
                    const float* __restrict sigmoid, int n, bool fused, bf16* __restrict out) const {
    for (int j = 0; j < n; j++) {
      const float inner = rounded(float_of_bf16(da[j]) * float_of_bf16(up[j]));
      out[j] = rounded_bits(inner * sigmoid[j] * rest(float_of_bf16(gate[j]), sigmoid[j], fused));
    }
  }
};

template <class Source>
static float fill(const Source& source, int64_t rows, bf16* out, int threads) {
  const int64_t cols = source.in.cols;
  int32_t amax = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(max : amax) if (rows * cols > 32768)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c += PIECE) {
      const int width = (int)std::min<int64_t>(PIECE, cols - c);
      const bf16* line = source.row(r, c, width, out + r * cols + c);
      int32_t most = 0;
      for (int j = 0; j < width; j++) {
        const int32_t magnitude = line[j] & 0x7fff;
        most = magnitude > most ? magnitude : most;
      }
      amax = most > amax ? most : amax;
    }
  return float_of((uint32_t)amax << 16);
}

}  // namespace quaver

using namespace quaver;

// Quantises a computed source to MXFP8; results as in quaver_mx_quantize.
QUAVER_API int quaver_mx_experts(const Inputs* in, const int64_t* ends, int64_t groups, int64_t group_rows, int rceil,
                                 uint8_t* row_codes, uint8_t* row_scales, bf16* row_values, uint8_t* col_codes,
                                 uint8_t* col_scales, bf16* col_values, int threads) {
  const Output row = {row_codes, row_scales, row_values}, col = {col_codes, col_scales, col_values};
  const std::vector<Span> spans = spans_of(ends, groups, group_rows);
  if (in->kind == 0) return quantize<bf16>(ScaledRows{*in}, in->cols, spans, row, col, rceil != 0, threads);
  if (in->kind == 1) return quantize<bf16>(SwiGLU{*in}, in->cols, spans, row, col, rceil != 0, threads);
  return quantize<bf16>(SwiGLUGradient{*in}, in->cols, spans, row, col, rceil != 0, threads);
}

// `rest` of all BF16 patterns: FP32 [65536].
QUAVER_API void quaver_silu_rest(const float* sigmoid, int fused, float* out, int) {
  for (uint32_t x = 0; x < 65536; x++) out[x] = rest(float_of(x << 16), sigmoid[x], fused != 0);
}

// The same sources as BF16 [rows, cols], and their largest magnitude.
QUAVER_API void quaver_fill_experts(const Inputs* in, int64_t rows, bf16* out, float* amax, int threads) {
  if (in->kind == 0)
    *amax = fill(ScaledRows{*in}, rows, out, threads);
  else if (in->kind == 1)
    *amax = fill(SwiGLU{*in}, rows, out, threads);
  else
    *amax = fill(SwiGLUGradient{*in}, rows, out, threads);
}

// Sums each token's k rows in FP32, in order, times their weights where there are any, and rounds once:
// y [tokens * k, cols] at `place` [tokens, k], weight [tokens, k] -> out [tokens, cols].
QUAVER_API void quaver_combine(const bf16* y, const int64_t* place, const float* weight, int64_t tokens, int64_t k,
                               int64_t cols, bf16* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * k * cols > 32768)
  for (int64_t t = 0; t < tokens; t++) {
    float sum[PIECE];
    for (int64_t c = 0; c < cols; c += PIECE) {
      const int width = (int)std::min<int64_t>(PIECE, cols - c);
      for (int j = 0; j < width; j++) sum[j] = 0.0f;
      for (int64_t i = 0; i < k; i++) {
        const bf16* __restrict line = y + place[t * k + i] * cols + c;
        if (t + 1 < tokens)  // rows lie anywhere: no processor guesses the next ones
          for (int j = 0; j < width; j += BLOCK) fetch_block(y + place[(t + 1) * k + i] * cols + c + j);
        if (weight) {
          const float factor = weight[t * k + i];
          for (int j = 0; j < width; j++) sum[j] += float_of_bf16(line[j]) * factor;
        } else {
          for (int j = 0; j < width; j++) sum[j] += float_of_bf16(line[j]);
        }
      }
      for (int j = 0; j < width; j++) out[t * cols + c + j] = bf16_of_float(sum[j]);
    }
  }
}

// FP32 products y[place[t, i]] * g[t] of some tokens: [tokens, k, cols], for torch to sum in its own order.
QUAVER_API void quaver_products(const bf16* y, const int64_t* place, const bf16* g, int64_t tokens, int64_t k,
                                int64_t cols, float* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * k * cols > 32768)
  for (int64_t row = 0; row < tokens * k; row++) {
    const bf16 *__restrict a = y + place[row] * cols, *__restrict b = g + row / k * cols;
    float* __restrict to = out + row * cols;
    if (row + 1 < tokens * k)
      for (int64_t j = 0; j < cols; j += BLOCK) fetch_block(y + place[row + 1] * cols + j);
    for (int64_t j = 0; j < cols; j++) to[j] = float_of_bf16(a[j]) * float_of_bf16(b[j]);
  }
}
