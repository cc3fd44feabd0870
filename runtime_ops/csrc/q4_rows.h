// A form of `q4_rows`: included once for each, behind grouped_tile.h, `signed_at` (levels of a row), `nibbles` (the high
// and the low halves of bytes, each a `Half`), `halves_at` (kSumLanes numbers of 16 bits as floats), `added_lanes` (their sum) and
// `of_groups` (a factor for each group, in the lanes that its sums are in).
static void q4_rows(const Matrix& w, int64_t begin, int64_t end, const int8_t* q, const float* factors,
                    const float* x_sums, float* sums) {
  constexpr int64_t kAtOnce = kSumLanes / 4, kBytes = kQ4Group / 2;  // groups of a vector; bytes of a group
  const int64_t groups = w.inputs / kQ4Group;
  const int8_t* odds = q + padded_groups(w) * kBytes;
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + row * groups * kBytes;
    const uint16_t *halves = w.halves + row * groups, *minima = w.minima + row * groups;
    // Reads of the rows behind this one meet zeros; behind the last row memory may end.
    const bool may_end = (w.outputs - row - 1) * groups < kHalves;
    Floats acc = Floats{};
    for (int64_t first = 0; first < groups; first += kHalves) {
      const int64_t count = groups - first < kHalves ? groups - first : kHalves;
      const uint16_t *some_halves = halves + first, *some_minima = minima + first;
      uint16_t last_halves[kHalves], last_minima[kHalves];
      if (may_end && count < kHalves) {
        std::memset(last_halves, 0, sizeof last_halves);
        std::memset(last_minima, 0, sizeof last_minima);
        std::memcpy(last_halves, some_halves, sizeof(uint16_t) * static_cast<size_t>(count));
        std::memcpy(last_minima, some_minima, sizeof(uint16_t) * static_cast<size_t>(count));
        some_halves = last_halves;
        some_minima = last_minima;
      }
      float scales[kHalves];
      for (int64_t i = 0; i < count; i += kSumLanes) {
        Floats factor, x_sum;
        std::memcpy(&factor, factors + first + i, sizeof factor);
        std::memcpy(&x_sum, x_sums + first + i, sizeof x_sum);
        const Floats scale = halves_at(some_halves + i) * factor;
        std::memcpy(scales + i, &scale, sizeof scale);
        acc += halves_at(some_minima + i) * x_sum;
      }
      for (int64_t group = 0; group < count; group += kAtOnce) {
        const int64_t at = (first + group) * kBytes;
        const uint8_t* from = bytes + at;
        uint8_t last[kAtOnce * kBytes];
        if (may_end && count - group < kAtOnce) {
          std::memset(last, 0, sizeof last);
          std::memcpy(last, from, static_cast<size_t>((count - group) * kBytes));
          from = last;
        }
        __builtin_prefetch(bytes + at + kAhead);
        Half high, low;
        nibbles(from, high, low);
        FourBits::Part part{};
        part = FourBits::dot(FourBits::dot(part, signed_at(q + at), high), signed_at(odds + at), low);
        acc += __builtin_convertvector(FourBits::whole(part), Floats) * of_groups(scales + group);
      }
    }
    sums[row - begin] = added_lanes(acc);
  }
}
