// A form of `q8_rows`: included once for each, behind grouped_tile.h, q4_rows.h, `signed_at` (levels of one row, of as
// many k as `Weights` has) and `of_whole_groups` (a factor for each group, in the lanes that its sums are in).
//
// A row at a time: rows lie one behind another, and one stream is read twice as fast as four that are interleaved.
static void q8_rows(const int8_t* levels, int64_t stride, int64_t rows, const int8_t* q, const float* factors,
                    int64_t length, float* sums) {
  constexpr int64_t kStep = 4 * kSumLanes, kLength = kStep > kQ4Group ? kStep : kQ4Group;
  int8_t none[kStep] = {};
  for (int64_t row = 0; row < rows; ++row) {
    const int8_t* from = levels + row * stride;
    Floats acc = Floats{};
    int64_t k = 0;
    for (; k + kLength <= length; k += kLength) {
      __builtin_prefetch(from + k + kAhead);
      EightBits::Part part{};
#pragma GCC unroll 2
      for (int64_t i = k; i < k + kLength; i += kStep) {
        part = EightBits::dot(part, signed_at(q + i), EightBits::weights(from + i));
        if (EightBits::kLifts) part -= EightBits::dot(EightBits::Part{}, signed_at(q + i), EightBits::weights(none));
      }
      acc += __builtin_convertvector(EightBits::whole(part), Floats) * of_whole_groups(factors + k / kQ4Group);
    }
    float sum = added_lanes(acc);
    while (k < length) {
      const int64_t group = k / kQ4Group, end = (group + 1) * kQ4Group < length ? (group + 1) * kQ4Group : length;
      int32_t some = 0;
      for (; k < end; ++k) some += q[k] * from[k];
      sum += static_cast<float>(some) * factors[group];
    }
    sums[row] = sum;
  }
}
