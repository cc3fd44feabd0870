// A form of `q8_rows`: included once for each, behind integer_tile.h, kOffset (what `row_at` takes from each level),
// `row_at` (levels of one row, of as many k as a `Packed` has) and `dot_row`, all for one kind of processor.
static void q8_rows(const int8_t* levels, int64_t stride, int64_t rows, const uint8_t* u, int32_t zero, int64_t length,
                    int32_t* sums) {
  constexpr int kAtOnce = 4;  // rows, so that each load of u serves them all
  constexpr int64_t kStep = 4 * kSumLanes;
  uint8_t ones[kStep];
  std::memset(ones, 1 + kOffset, sizeof ones);
  const Row one = row_at(ones);
  for (int64_t row = 0; row < rows; row += kAtOnce) {
    const int8_t* from[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) from[i] = levels + (row + i < rows ? row + i : rows - 1) * stride;
    Sums acc[kAtOnce], totals[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) acc[i] = totals[i] = Sums{};
    int64_t k = 0;
    for (; k + kStep <= length; k += kStep) {
      const Row value = row_at(u + k);
#pragma GCC unroll 4
      for (int i = 0; i < kAtOnce; ++i) {
        __builtin_prefetch(from[i] + k + kAhead);
        const Packed weights = unpack(from[i] + k);
        acc[i] = dot_row(acc[i], value, weights);
        totals[i] = dot_row(totals[i], one, weights);
      }
    }
    for (int i = 0; i < kAtOnce && row + i < rows; ++i) {
      const Sums both = acc[i] - (zero - kOffset) * totals[i];
      int32_t sum = 0;
      for (int lane = 0; lane < kSumLanes; ++lane) sum += both[lane];
      for (int64_t at = k; at < length; ++at) sum += (u[at] - zero) * from[i][at];
      sums[row + i] = sum;
    }
  }
}
