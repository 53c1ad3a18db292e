// Bit patterns of FP32, BF16 and E4M3 that the kernels share; plain C++11, no library but the standard one.
//
// Everything is integer arithmetic or exact FP32 arithmetic on whole lanes of 32 elements, written as loops of a
// fixed length that compilers turn into vector code at any instruction set. Nothing here may be compiled with
// -ffast-math: the pure-torch codecs are the definition, and every kernel is equal to them bit for bit.
#pragma once

#include <cstdint>
#include <cstring>

// Registers of 512 bits with operations on bytes and words, and their 256-bit forms.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define QUAVER_AVX512
#endif

#define QUAVER_API extern "C" __attribute__((visibility("default")))
// Table lookups are faster one by one than gathered into vectors.
#if defined(__GNUC__) && !defined(__clang__)
#define SCALAR __attribute__((noinline, optimize("no-tree-vectorize", "no-tree-slp-vectorize")))
#else
#define SCALAR __attribute__((noinline))
#endif
#define INLINE inline __attribute__((always_inline))

namespace quaver {

typedef uint16_t bf16;

constexpr int BLOCK = 32;                     // elements that share a scale
constexpr uint32_t INF_WORD = 0x7f800000u;    // FP32 +Inf; larger magnitudes are NaN
constexpr uint32_t NAN_SCALE = 255;           // E8M0 byte of a block that holds NaN or Inf
constexpr uint32_t FIRST_BF16_SCALE = 10;     // bytes whose blocks decode to normal BF16 numbers
constexpr uint32_t LAST_BF16_SCALE = 246;
constexpr uint32_t E4M3_TWO = 0x40;           // code of 2.0: below it, byte 0 decodes to a BF16 subnormal

static INLINE uint32_t word_of(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}

static INLINE float float_of(uint32_t word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

static INLINE float float_of_bf16(bf16 bits) { return float_of((uint32_t)bits << 16); }

// FP32 -> BF16, round to nearest even; NaN becomes torch's quiet NaN.
static INLINE bf16 bf16_of_float(float value) {
  uint32_t word = word_of(value);
  uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  return (bf16)((word & 0x7fffffffu) > INF_WORD ? 0x7fc0u : rounded);
}

static INLINE uint32_t word_of_element(uint32_t element) { return element; }        // FP32 bits
static INLINE uint32_t word_of_element(bf16 element) { return (uint32_t)element << 16; }

// Asks for the lines of BLOCK elements.
template <class T>
static INLINE void fetch_block(const T* x) {
  __builtin_prefetch(x);
  if (sizeof(T) == 4) __builtin_prefetch(x + BLOCK / 2);
}

// Transposes 8 x 8 16-bit elements: row i of `from` (rows `pitch` apart) becomes column i of `to`.
static INLINE void transpose_8x8(const uint16_t* from, int64_t pitch, uint16_t* to, int64_t to_pitch) {
  typedef uint16_t lanes __attribute__((vector_size(16)));
#if defined(__clang__)
#define QUAVER_MIX(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else  // GCC has __builtin_shufflevector from 12 on only
#define QUAVER_MIX(x, y, ...) __builtin_shuffle(x, y, lanes{__VA_ARGS__})
#endif
  lanes a[8], b[8];
  for (int i = 0; i < 8; i++) std::memcpy(&a[i], from + i * pitch, 16);
  // Three rounds of interleaving row i with row i + 4 put element (i, j) at (j, i).
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 4; i++) {
      b[2 * i] = QUAVER_MIX(a[i], a[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      b[2 * i + 1] = QUAVER_MIX(a[i], a[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i++) a[i] = b[i];
  }
  for (int i = 0; i < 8; i++) std::memcpy(to + i * to_pitch, &a[i], 16);
}

}  // namespace quaver
