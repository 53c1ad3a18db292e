// What the routed experts quantise is computed while it is quantised: gathered rows times their routing weight,
// SwiGLU, and SwiGLU's gradient. The BF16 roundings between the steps are those of torch's own operators.
//
// SiLU of BF16 is a table of torch's results over all 65,536 patterns; its derivative is two FP32 factors a pattern.
#include "mx_quantize.h"

namespace quaver {

constexpr int PIECE = 256;  // elements of a row at a time, where there is something in between

// Factors of torch's silu_backward: dy * sigmoid(x) * (1 + x * (1 - sigmoid(x))), multiplied from left to right.
struct Slope {
  float sigmoid, rest;
};

struct Inputs {
  int kind;              // of the sources below
  const bf16* a;         // scaled rows: g [*, cols]; SwiGLU: h [rows, 2 cols]; its gradient: da [rows, cols / 2]
  const bf16* b;         // gradient: h [rows, cols]
  const int64_t* index;  // scaled rows: which row of `a` each row is
  const float* weight;   // scaled rows: factor of each row
  const bf16* silu;      // SiLU of all BF16 patterns
  const Slope* slope;    // its derivative's factors
  int64_t cols;          // of the result
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
};

SCALAR static void look_up_silu(const bf16* __restrict x, int n, const bf16* __restrict table, bf16* __restrict out) {
  for (int j = 0; j < n; j++) out[j] = table[x[j]];
}

SCALAR static void look_up_slope(const bf16* __restrict x, int n, const Slope* __restrict table,
                                 Slope* __restrict out) {
  for (int j = 0; j < n; j++) std::memcpy(out + j, table + x[j], sizeof(Slope));  // one load and one store
}

static INLINE void multiply_rounded(const bf16* __restrict a, const bf16* __restrict b, int n, bf16* __restrict out) {
  for (int j = 0; j < n; j++) out[j] = bf16_of_float(float_of_bf16(a[j]) * float_of_bf16(b[j]));
}

// row r = bf16(silu(gate) * up), gate and up being the halves of h's row
struct SwiGLU {
  static constexpr bool computed = true;
  Inputs in;
  INLINE const bf16* row(int64_t r, int64_t first, int width, bf16* __restrict out) const {
    const bf16* gate = in.a + r * 2 * in.cols + first;
    for (int j = 0; j < width; j += PIECE) {
      const int n = std::min(PIECE, width - j);
      bf16 silu[PIECE];
      look_up_silu(gate + j, n, in.silu, silu);
      multiply_rounded(silu, gate + in.cols + j, n, out + j);
    }
    return out;
  }
};

// row r = [bf16(bf16(da * up) * slope(gate)), bf16(da * silu(gate))]
struct SwiGLUGradient {
  static constexpr bool computed = true;
  Inputs in;
  INLINE const bf16* row(int64_t r, int64_t first, int width, bf16* __restrict out) const {
    const int64_t half = in.cols / 2;
    const int left = (int)std::max<int64_t>(0, std::min<int64_t>(width, half - first));
    const bf16 *da = in.a + r * half, *gate = in.b + r * in.cols;
    for (int j = 0; j < left; j += PIECE) slope(da + first + j, gate + first + j, std::min(PIECE, left - j), out + j);
    for (int j = left; j < width; j += PIECE) {
      const int n = std::min(PIECE, width - j);
      const int64_t at = first + j - half;
      bf16 silu[PIECE];
      look_up_silu(gate + at, n, in.silu, silu);
      multiply_rounded(silu, da + at, n, out + j);
    }
    return out;
  }
  INLINE void slope(const bf16* __restrict da, const bf16* __restrict gate, int n, bf16* __restrict out) const {
    const bf16* __restrict up = gate + in.cols / 2;
    Slope found[PIECE];
    look_up_slope(gate, n, in.slope, found);
    for (int j = 0; j < n; j++) {
      const float inner = float_of_bf16(bf16_of_float(float_of_bf16(da[j]) * float_of_bf16(up[j])));
      out[j] = bf16_of_float(inner * found[j].sigmoid * found[j].rest);
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
    for (int64_t j = 0; j < cols; j++) to[j] = float_of_bf16(a[j]) * float_of_bf16(b[j]);
  }
}
