// A form of `q8_rows`: included once for each, behind integer_tile.h, kOffset (what `row_at` takes from each level),
// `row_at` (levels of one row, of as many k as a `Packed` has) and `dot_row`, all for one kind of processor.
//
// A row at a time: rows lie one behind another, and one stream is read twice as fast as four that are interleaved.
static void q8_rows(const int8_t* levels, int64_t stride, int64_t rows, const uint8_t* u, int32_t zero, int64_t length,
                    int32_t* sums) {
  constexpr int64_t kStep = 4 * kSumLanes;
  uint8_t ones[kStep];
  std::memset(ones, 1 + kOffset, sizeof ones);
  const Row one = row_at(ones);
  for (int64_t row = 0; row < rows; ++row) {
    const int8_t* from = levels + row * stride;
    Sums acc = Sums{}, totals = Sums{};
    int64_t k = 0;
    for (; k + kStep <= length; k += kStep) {
      __builtin_prefetch(from + k + kAhead);
      const Packed weights = unpack(from + k);
      acc = dot_row(acc, row_at(u + k), weights);
      totals = dot_row(totals, one, weights);
    }
    const Sums both = acc - (zero - kOffset) * totals;
    int32_t sum = 0;
    for (int lane = 0; lane < kSumLanes; ++lane) sum += both[lane];
    for (; k < length; ++k) sum += (u[k] - zero) * from[k];
    sums[row] = sum;
  }
}
