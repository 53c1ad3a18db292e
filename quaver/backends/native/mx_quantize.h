// MXFP8 quantisation of tiles: 32 rows by some columns are read once and give row blocks, column blocks, or both.
//
// A row block runs along a row (1 x 32), a column block down a column (32 x 1). Of each, codes, E8M0 scales and the
// dequantised BF16 values are written where wanted. A block that lies wholly in E4M3's normal range is rounded as
// 16-bit integers; everything else takes exact FP32 arithmetic, lane by lane.
#pragma once

#include <algorithm>
#include <vector>

#include "bits.h"
#ifdef __SSE4_1__
#include <immintrin.h>
#endif

namespace quaver {

constexpr int TILE = 256;  // columns of a tile: 16 KiB of BF16, half of a first-level cache

// Where one direction's results go; a null pointer is not wanted. `values` implies a flag: see `quantize`.
struct Output {
  uint8_t* codes;
  uint8_t* scales;
  bf16* values;
  bool wanted() const { return codes != nullptr || values != nullptr; }
};

// floor: floor(log2 amax) - 8; rceil: a mantissa above 1.75 carries into the exponent. `carry` is 0 or 0x1fffff.
static INLINE uint32_t scale_byte(uint32_t amax_word, uint32_t carry) {
  int32_t exponent = (int32_t)((amax_word + carry) >> 23) - 8;
  return amax_word >= INF_WORD ? NAN_SCALE : (uint32_t)(exponent < 0 ? 0 : exponent);
}

// What a scale byte means for an element, for a whole row block ...
struct RowScale {
  uint32_t byte;
  bool plain;  // the 16-bit path may be tried
  uint16_t smallest_, largest_, offset_;
  float inverse_;

  INLINE explicit RowScale(uint32_t s) : byte(s) {
    plain = s >= FIRST_BF16_SCALE && s <= LAST_BF16_SCALE;
    smallest_ = (uint16_t)((s - 6) << 7);           // BF16 bits of 2^-6, E4M3's smallest normal, at this scale
    largest_ = (uint16_t)(((s + 8) << 7) | 0x60);   // ... of 448
    offset_ = (uint16_t)((s - 7) << 3);             // from BF16's exponent to E4M3's
    inverse_ = s == NAN_SCALE ? 0.0f : float_of((254u - s) << 23);
  }
  INLINE uint16_t smallest(int) const { return smallest_; }
#ifdef __AVX512BW__
  INLINE __m512i smallest_less_one() const { return _mm512_set1_epi16((short)(smallest_ - 1)); }
#endif
  INLINE uint16_t largest(int) const { return largest_; }
  INLINE uint16_t offset(int) const { return offset_; }
  INLINE float inverse(int) const { return inverse_; }
  INLINE uint32_t scale(int) const { return byte; }
};

// ... and for each column of a tile. `from(c)` gives the 32 lanes that start at column c.
struct ColumnScales {
  alignas(64) uint16_t smallest_[TILE], largest_[TILE], offset_[TILE];
  alignas(64) float inverse_[TILE];
  alignas(64) uint32_t byte_[TILE];
  bool plain_[TILE / BLOCK];

  void set(const uint32_t* amax, int width, uint32_t carry) {
    for (int j = 0; j < width; j++) {
      uint32_t s = scale_byte(amax[j], carry);
      byte_[j] = s;
      smallest_[j] = (uint16_t)((s - 6) << 7);
      largest_[j] = (uint16_t)(((s + 8) << 7) | 0x60);
      offset_[j] = (uint16_t)((s - 7) << 3);
      inverse_[j] = s == NAN_SCALE ? 0.0f : float_of((254u - s) << 23);
    }
    for (int c = 0; c < width; c += BLOCK) {
      uint32_t outside = 0;
      for (int j = c; j < c + BLOCK; j++)
        outside |= (uint32_t)(byte_[j] - FIRST_BF16_SCALE > LAST_BF16_SCALE - FIRST_BF16_SCALE);
      plain_[c / BLOCK] = !outside;
    }
  }

  struct Lanes {
    const ColumnScales& all;
    int first;
    bool plain;
    INLINE uint16_t smallest(int j) const { return all.smallest_[first + j]; }
#ifdef __AVX512BW__
    INLINE __m512i smallest_less_one() const {
      return _mm512_sub_epi16(_mm512_loadu_si512(all.smallest_ + first), _mm512_set1_epi16(1));
    }
#endif
    INLINE uint16_t largest(int j) const { return all.largest_[first + j]; }
    INLINE uint16_t offset(int j) const { return all.offset_[first + j]; }
    INLINE float inverse(int j) const { return all.inverse_[first + j]; }
    INLINE uint32_t scale(int j) const { return all.byte_[first + j]; }
  };
  INLINE Lanes from(int column) const { return Lanes{*this, column, plain_[column / BLOCK]}; }
};

// True if no nonzero element is below E4M3's normal range: then rounding is the same at every exponent.
template <class Scale>
static INLINE bool all_normal(const bf16* __restrict x, const Scale& scale) {
#ifdef __AVX512BW__
  const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  const __m512i less_one = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1));
  return _mm512_cmplt_epu16_mask(less_one, scale.smallest_less_one()) == 0;
#else
  uint16_t below = 0;
  for (int j = 0; j < BLOCK; j++) {
    uint16_t magnitude = x[j] & 0x7fff;
    below |= (uint16_t)(magnitude - 1) < (uint16_t)(scale.smallest(j) - 1) ? 0xffff : 0;
  }
  return below == 0;
#endif
}

// 32 lanes by the 16-bit path: round the BF16 pattern to three mantissa bits, nearest even, and saturate.
template <class Scale>
static INLINE void encode_normal(const bf16* __restrict x, const Scale& scale, uint8_t* __restrict codes,
                                 bf16* __restrict values) {
  uint16_t rounded[BLOCK];
  for (int j = 0; j < BLOCK; j++) {
    uint16_t magnitude = x[j] & 0x7fff;
    uint16_t r = (uint16_t)(magnitude + 7 + ((magnitude >> 4) & 1)) & 0xfff0;
    rounded[j] = r > scale.largest(j) ? scale.largest(j) : r;
  }
  if (codes)
    for (int j = 0; j < BLOCK; j++) {
      uint16_t top = rounded[j] >> 4, offset = scale.offset(j);
      top = (uint16_t)(top > offset ? top - offset : 0);  // zero stays zero
      codes[j] = (uint8_t)(top | ((x[j] >> 8) & 0x80));
    }
  if (values)
    for (int j = 0; j < BLOCK; j++) values[j] = (bf16)(rounded[j] | (x[j] & 0x8000));
}

// Nonzero if a BF16 value of these lanes would not be a normal number that equals its code: the rule by which the
// reference codec refuses BF16, block by block.
template <class Scale>
static INLINE uint32_t not_bf16(const uint32_t* code, const Scale& scale) {
  uint32_t unsafe = 0;
  for (int j = 0; j < BLOCK; j++) {
    uint32_t s = scale.scale(j), c = code[j] & 0x7fu;
    uint32_t outside = (uint32_t)(s - FIRST_BF16_SCALE > LAST_BF16_SCALE - FIRST_BF16_SCALE) & (uint32_t)(s != 0);
    uint32_t subnormal = (uint32_t)(s == 0) & (uint32_t)(c - 1 < E4M3_TWO - 1);
    unsafe |= outside | subnormal;
  }
  return unsafe;
}

// 32 lanes in exact FP32 arithmetic. Returns nonzero if the values are not to be used.
template <class Scale, class T>
static INLINE uint32_t encode_exact(const T* __restrict x, const Scale& scale, uint8_t* __restrict codes,
                                    bf16* __restrict values) {
  uint32_t code[BLOCK], value[BLOCK];
  for (int j = 0; j < BLOCK; j++) {
    uint32_t word = word_of_element(x[j]), sign = word & 0x80000000u, s = scale.scale(j);
    float scaled = float_of(word ^ sign) * scale.inverse(j);
    scaled = scaled > 448.0f ? 448.0f : scaled;
    uint32_t bits = word_of(scaled);
    uint32_t normal = (bits + 0x7ffffu + ((bits >> 20) & 1u)) & 0xfff00000u;
    float shifted = scaled + 16384.0f;  // 2^14: its unit in the last place is 2^-9, E4M3's smallest step
    uint32_t below = bits < (121u << 23) ? ~0u : 0u;
    uint32_t rounded = (below & word_of(shifted - 16384.0f)) | (~below & normal);
    uint32_t c = (below & (word_of(shifted) - 0x46800000u)) | (~below & ((normal >> 20) - 960u));
    code[j] = s == NAN_SCALE ? 0u : c | (sign >> 24);
    uint32_t v = (rounded >> 16) + ((s - 127u) << 7);
    value[j] = (rounded == 0 ? 0u : v) | (sign >> 16);
  }
  if (codes)
    for (int j = 0; j < BLOCK; j++) codes[j] = (uint8_t)code[j];
  if (!values) return 0;
  for (int j = 0; j < BLOCK; j++) values[j] = (bf16)value[j];
  return not_bf16(code, scale);
}

// 32 lanes by the quicker way that is right. `x` is `exact` in BF16 with a sticky last bit (or itself).
template <class Scale, class T>
static INLINE uint32_t encode(const bf16* x, const T* exact, const Scale& scale, uint8_t* codes, bf16* values) {
  if (__builtin_expect(scale.plain && all_normal(x, scale), 1)) {
    encode_normal(x, scale, codes, values);
    return 0;
  }
  return encode_exact(exact, scale, codes, values);
}

// Up to 32 lanes; a short block goes through a zero-padded copy.
template <class Scale, class T>
static INLINE uint32_t encode_some(const bf16* x, const T* exact, int n, const Scale& scale, uint8_t* codes,
                                   bf16* values) {
  if (__builtin_expect(n == BLOCK, 1)) return encode(x, exact, scale, codes, values);
  T padded[BLOCK] = {0};
  uint8_t padded_codes[BLOCK];
  bf16 padded_values[BLOCK];
  std::memcpy(padded, exact, n * sizeof(T));
  uint32_t unsafe = encode_exact(padded, scale, padded_codes, padded_values);
  if (codes) std::memcpy(codes, padded_codes, n);
  if (values) std::memcpy(values, padded_values, n * sizeof(bf16));
  return unsafe;
}

// FP32 words cut to BF16 patterns whose last bit also says whether anything was cut off. Such a pattern rounds to
// three mantissa bits as its word does, has its exponent, and exceeds 1.75 * 2^k where its word does.
static INLINE void cut_sticky(const uint32_t* __restrict words, int n, bf16* __restrict out) {
  for (int j = 0; j < n; j++) out[j] = (bf16)((words[j] >> 16) | ((words[j] & 0xffffu) != 0 ? 1u : 0u));
}

// The largest magnitude of up to 32 elements, as an FP32 word.
static INLINE uint32_t largest_word(const bf16* __restrict x, int n) {
  uint16_t amax = 0;
  if (__builtin_expect(n == BLOCK, 1)) {
#ifdef __SSE4_1__
    const __m128i mask = _mm_set1_epi16(0x7fff);
    const __m128i* lanes = (const __m128i*)x;
    __m128i low = _mm_max_epu16(_mm_and_si128(_mm_loadu_si128(lanes), mask),
                                _mm_and_si128(_mm_loadu_si128(lanes + 1), mask));
    __m128i high = _mm_max_epu16(_mm_and_si128(_mm_loadu_si128(lanes + 2), mask),
                                 _mm_and_si128(_mm_loadu_si128(lanes + 3), mask));
    // The one horizontal instruction is a minimum: 0x7fff - a is a ^ 0x7fff.
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(_mm_max_epu16(low, high), mask));
    amax = (uint16_t)(0x7fff - _mm_extract_epi16(least, 0));
#else
    for (int j = 0; j < BLOCK; j++) {
      uint16_t magnitude = x[j] & 0x7fff;
      amax = magnitude > amax ? magnitude : amax;
    }
#endif
  } else {
    for (int j = 0; j < n; j++) {
      uint16_t magnitude = x[j] & 0x7fff;
      amax = magnitude > amax ? magnitude : amax;
    }
  }
  return (uint32_t)amax << 16;
}

// One row into the maxima of a tile's columns; a call a row keeps compilers from walking down the columns instead.
__attribute__((noinline)) static void raise_maxima(uint16_t* __restrict amax, const bf16* __restrict row, int width) {
  for (int j = 0; j < width; j++) {
    uint16_t magnitude = row[j] & 0x7fff;
    amax[j] = magnitude > amax[j] ? magnitude : amax[j];
  }
}

// Largest magnitudes of a tile's columns, as FP32 words; rows are `count` pointers.
static INLINE void column_maxima(const bf16* const* rows, int count, int width, uint32_t* amax) {
  uint16_t narrow[TILE] = {0};
  for (int r = 0; r < count; r++) raise_maxima(narrow, rows[r], width);
  for (int j = 0; j < TILE; j++) amax[j] = (uint32_t)narrow[j] << 16;
}

// The rows of one column block.
struct Span {
  int64_t first;
  int count;
};

// Column blocks that restart at each group. With `ends` (cumulative) groups differ, else all have `group_rows`.
static inline std::vector<Span> spans_of(const int64_t* ends, int64_t groups, int64_t group_rows) {
  std::vector<Span> spans;
  int64_t start = 0;
  for (int64_t g = 0; g < groups; g++) {
    int64_t end = ends ? ends[g] : start + group_rows;
    for (int64_t row = start; row < end; row += BLOCK)
      spans.push_back(Span{row, (int)std::min<int64_t>(BLOCK, end - row)});
    start = end;
  }
  return spans;
}

// Quantises [rows, cols]. `Source` gives rows of a tile: `row(r, first column, width, buffer)` answers a pointer to
// `width` elements, either its own or the buffer that it has filled. Returns a set of flags: 1, or 2, if the row,
// or the column, values are not to be used.
template <class T, class Source>
static int quantize(const Source& source, int64_t cols, const std::vector<Span>& spans, const Output& row,
                    const Output& col, uint32_t carry, int threads) {
  const int64_t tiles = (cols + TILE - 1) / TILE, row_blocks = (cols + BLOCK - 1) / BLOCK;
  const int64_t work = (int64_t)spans.size() * tiles;
  uint32_t flags = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : flags) if (work > 4)
  for (int64_t t = 0; t < work; t++) {
    const Span span = spans[t / tiles];
    const int64_t c0 = (t % tiles) * TILE;
    const int width = (int)std::min<int64_t>(TILE, cols - c0);
    alignas(64) T buffer[Source::computed ? BLOCK * TILE : 1];
    alignas(64) bf16 cut[sizeof(T) == 4 ? BLOCK * TILE : 1];
    const T* exact[BLOCK];
    const bf16* lines[BLOCK];
    for (int r = 0; r < span.count; r++) {
      exact[r] = source.row(span.first + r, c0, width, buffer + (Source::computed ? r * TILE : 0));
      lines[r] = sizeof(T) == 4 ? cut + r * TILE : (const bf16*)exact[r];
      if (sizeof(T) == 4) cut_sticky((const uint32_t*)exact[r], width, cut + r * TILE);
    }
    ColumnScales scales;
    if (col.wanted()) {
      uint32_t amax[TILE];
      column_maxima(lines, span.count, width, amax);
      scales.set(amax, (width + BLOCK - 1) / BLOCK * BLOCK, carry);
      uint8_t* out = col.scales + (t / tiles) * cols + c0;
      for (int j = 0; j < width; j++) out[j] = (uint8_t)scales.byte_[j];
    }
    for (int r = 0; r < span.count; r++) {
      const int64_t at = (span.first + r) * cols + c0;
      for (int c = 0; c < width; c += BLOCK) {
        const int n = std::min(BLOCK, width - c);
        const bf16* x = lines[r] + c;
        if (col.wanted())
          flags |= encode_some(x, exact[r] + c, n, scales.from(c), col.codes ? col.codes + at + c : nullptr,
                               col.values ? col.values + at + c : nullptr) << 1;
        if (row.wanted()) {
          const RowScale scale(scale_byte(largest_word(x, n), carry));
          row.scales[(span.first + r) * row_blocks + (c0 + c) / BLOCK] = (uint8_t)scale.byte;
          flags |= encode_some(x, exact[r] + c, n, scale, row.codes ? row.codes + at + c : nullptr,
                               row.values ? row.values + at + c : nullptr);
        }
      }
    }
  }
  return (int)flags;
}

}  // namespace quaver
