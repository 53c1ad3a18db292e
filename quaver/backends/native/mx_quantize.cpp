// MXFP8 quantisation of a tensor as it lies in memory: rows in order, or picked by an index.
#include "mx_quantize.h"

namespace quaver {

template <class T>
struct Rows {
  static constexpr bool computed = false;
  const T* data;
  int64_t stride;
  const int64_t* index;  // row r is row index[r] of the data; null: row r
  INLINE const T* row(int64_t r, int64_t first, int, T*) const {
    return data + (index ? index[r] : r) * stride + first;
  }
  INLINE void fetch(int64_t r, int64_t c) const { fetch_block(data + (index ? index[r] : r) * stride + c); }
};

}  // namespace quaver

using namespace quaver;

// x: [rows, cols], BF16 or FP32, rows `stride` elements apart; with `index` the rows to take. Column blocks restart
// at each of `groups` groups: cumulative `ends`, or `group_rows` each. Pointers of unwanted results are null.
QUAVER_API int quaver_mx_quantize(const void* x, int is_fp32, int64_t cols, int64_t stride, const int64_t* index,
                                  const int64_t* ends, int64_t groups, int64_t group_rows, int rceil,
                                  uint8_t* row_codes, uint8_t* row_scales, bf16* row_values, uint8_t* col_codes,
                                  uint8_t* col_scales, bf16* col_values, int threads) {
  const Output row = {row_codes, row_scales, row_values}, col = {col_codes, col_scales, col_values};
  const std::vector<Span> spans = spans_of(ends, groups, group_rows);
  if (is_fp32)
    return quantize<uint32_t>(Rows<uint32_t>{(const uint32_t*)x, stride, index}, cols, spans, row, col, rceil != 0, threads);
  return quantize<bf16>(Rows<bf16>{(const bf16*)x, stride, index}, cols, spans, row, col, rceil != 0, threads);
}
