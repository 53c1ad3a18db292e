// HiF8: amax, codes of x / scale, and codes back to BF16.
//
// With AVX512 32 elements at a time; without it, BF16 input of some size takes a table over all its 65,536 patterns at
// the tensor's scale and divides no more.
#include "hif8_lanes.h"

namespace quaver {

#ifdef QUAVER_AVX512
// Of whole blocks of 32; the numbers of those that are left to the divider go to `far`. Returns how many they are.
template <bool VALUES, class T>
__attribute__((noinline)) static int encode_lanes(const T* __restrict x, int blocks, const LaneEncoder& encoder,
                                                  uint8_t* __restrict codes, bf16* __restrict values,
                                                  uint16_t* __restrict far) {
  const LaneEncoder lanes = encoder;
  int count = 0;
  for (int b = 0; b < blocks; b++) {
    far[count] = (uint16_t)b;
    count += lanes.encode<VALUES>(x + 32 * b, codes + 32 * b, VALUES ? values + 32 * b : nullptr) != 0;
  }
  return count;
}

// At most CHUNK elements: codes, and values unless null.
template <class T>
static void encode_chunk(const T* x, int64_t n, const LaneEncoder& lanes, uint8_t* codes, bf16* values,
                         const bf16* table) {
  const int blocks = lanes.fits ? (int)(n / 32) : 0;
  uint16_t far[CHUNK / 32 + 1];
  const int left = values ? encode_lanes<true>(x, blocks, lanes, codes, values, far)
                          : encode_lanes<false>(x, blocks, lanes, codes, values, far);
  for (int i = 0; i < left; i++) {
    encode_divided(x + 32 * far[i], 32, lanes.scale, codes + 32 * far[i]);
    if (values) values_of(codes + 32 * far[i], 32, table, values + 32 * far[i]);
  }
  const int64_t done = 32 * (int64_t)blocks;
  if (done == n) return;
  encode_divided(x + done, n - done, lanes.scale, codes + done);
  if (values) values_of(codes + done, n - done, table, values + done);
}

template <class T>
static void encode_tensor(const T* x, int64_t n, float scale, uint8_t* codes, bf16* values, const bf16* table,
                          int threads) {
  static const LaneTables tables;
#pragma omp parallel for schedule(static) num_threads(threads) if (n > 32768)
  for (int64_t c = 0; c < (n + CHUNK - 1) / CHUNK; c++) {
    const int64_t from = c * CHUNK, m = n - from < CHUNK ? n - from : CHUNK;
    uint8_t unwanted[CHUNK];
    encode_chunk(x + from, m, LaneEncoder(scale, tables), codes ? codes + from : unwanted,
                 values ? values + from : nullptr, table);
  }
}
#else
constexpr int64_t TABLE_FROM = 1 << 17;  // elements from which a table repays its building

// Codes of all 65,536 BF16 patterns at a scale: negative ones have the quotients of positive ones, but for the sign.
static std::vector<uint8_t> codes_of_patterns(float scale) {
  std::vector<uint8_t> patterns(65536);
  const uint8_t* codes = codes_by_top_bits();
  for (uint32_t from = 0; from < 32768; from += CHUNK) {
    uint16_t top[CHUNK];
    for (uint32_t j = 0; j < CHUNK; j++) top[j] = (uint16_t)(word_of(float_of((from + j) << 16) / scale) >> 19);
    for (uint32_t j = 0; j < CHUNK; j++) {
      patterns[from + j] = codes[top[j]];
      patterns[32768 + from + j] = codes[top[j] ^ 0x1000];
    }
  }
  return patterns;
}

template <class T>
static void encode_tensor(const T* x, int64_t n, float scale, uint8_t* codes, bf16* values, const bf16* table,
                          int threads) {
  std::vector<uint8_t> patterns;
  if (sizeof(T) == sizeof(bf16) && n >= TABLE_FROM) patterns = codes_of_patterns(scale);
  const uint8_t* lookup = patterns.empty() ? nullptr : patterns.data();
#pragma omp parallel for schedule(static) num_threads(threads) if (n > 32768)
  for (int64_t c = 0; c < (n + CHUNK - 1) / CHUNK; c++) {
    const int64_t from = c * CHUNK, m = n - from < CHUNK ? n - from : CHUNK;
    uint8_t unwanted[CHUNK];
    uint8_t* to = codes ? codes + from : unwanted;
    if (lookup)
      codes_of((const bf16*)x + from, m, lookup, to);
    else
      encode_divided(x + from, m, scale, to);
    if (values) values_of(to, m, table, values + from);
  }
}
#endif

template <class T>
static uint32_t amax_word(const T* x, int64_t n, int threads) {
  int32_t amax = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(max : amax) if (n > 32768)
  for (int64_t c = 0; c < (n + CHUNK - 1) / CHUNK; c++) {
    const int64_t from = c * CHUNK, m = n - from < CHUNK ? n - from : CHUNK;
    int32_t most = 0;
    for (int64_t j = 0; j < m; j++) {
      int32_t magnitude = (int32_t)(word_of_element(x[from + j]) & 0x7fffffffu);
      most = magnitude > most ? magnitude : most;
    }
    amax = most > amax ? most : amax;
  }
  return (uint32_t)amax;
}

}  // namespace quaver

using namespace quaver;

// Largest magnitudes of `batch` pieces of n elements each; NaN if there is one.
QUAVER_API void quaver_amax(const void* x, int is_fp32, int64_t batch, int64_t n, float* out, int threads) {
  for (int64_t b = 0; b < batch; b++)
    out[b] = float_of(is_fp32 ? amax_word((const uint32_t*)x + b * n, n, threads)
                              : amax_word((const bf16*)x + b * n, n, threads));
}

// Dequantisation scales of `batch` pieces: amax / format_max where that is finite and above 0, else 1.
QUAVER_API void quaver_hif8_scales(const void* x, int is_fp32, int64_t batch, int64_t n, float format_max, float* out,
                                   int threads) {
  quaver_amax(x, is_fp32, batch, n, out, threads);
  for (int64_t b = 0; b < batch; b++) {
    const float quotient = out[b] / format_max;
    out[b] = quotient > 0.0f && word_of(quotient) < INF_WORD ? quotient : 1.0f;
  }
}

// Codes of `batch` pieces of n elements, each with its FP32 scale, and the codes' BF16 values by `table`; a null
// pointer is not wanted.
QUAVER_API void quaver_hif8_encode(const void* x, int is_fp32, int64_t batch, int64_t n, const float* scales,
                                   uint8_t* codes, bf16* values, const bf16* table, int threads) {
  for (int64_t b = 0; b < batch; b++) {
    bf16* to = values ? values + b * n : nullptr;
    if (is_fp32)
      encode_tensor((const uint32_t*)x + b * n, n, scales[b], codes ? codes + b * n : nullptr, to, table, threads);
    else
      encode_tensor((const bf16*)x + b * n, n, scales[b], codes ? codes + b * n : nullptr, to, table, threads);
  }
}

QUAVER_API void quaver_hif8_decode(const uint8_t* codes, int64_t n, const bf16* table, bf16* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n > 32768)
  for (int64_t c = 0; c < (n + CHUNK - 1) / CHUNK; c++) {
    const int64_t from = c * CHUNK;
    values_of(codes + from, n - from < CHUNK ? n - from : CHUNK, table, out + from);
  }
}

// codes [batch, rows, cols] -> out [batch, cols, rows].
QUAVER_API void quaver_hif8_decode_transposed(const uint8_t* codes, int64_t batch, int64_t rows, int64_t cols,
                                              const bf16* table, bf16* out, int threads) {
  constexpr int TALL = 256, WIDE = 32;  // long runs of writes
  const int64_t down = (rows + TALL - 1) / TALL;
#pragma omp parallel for schedule(static) num_threads(threads) if (batch * rows * cols > 32768)
  for (int64_t t = 0; t < batch * down; t++) {
    const int64_t r0 = (t % down) * TALL;
    const int height = (int)(rows - r0 < TALL ? rows - r0 : TALL);
    const uint8_t* from = codes + (t / down) * rows * cols;
    bf16* to = out + (t / down) * rows * cols;
    for (int64_t c0 = 0; c0 < cols; c0 += WIDE) {
      const int width = (int)(cols - c0 < WIDE ? cols - c0 : WIDE);
      bf16 tile[TALL][WIDE];
      for (int r = 0; r < height; r++) values_of(from + (r0 + r) * cols + c0, width, table, tile[r]);
      if (height % 8 == 0 && width % 8 == 0) {
        for (int c = 0; c < width; c += 8)
          for (int r = 0; r < height; r += 8) transpose_8x8(&tile[r][c], WIDE, to + (c0 + c) * rows + r0 + r, rows);
      } else {
        for (int c = 0; c < width; c++)
          for (int r = 0; r < height; r++) to[(c0 + c) * rows + r0 + r] = tile[r][c];
      }
    }
  }
}
