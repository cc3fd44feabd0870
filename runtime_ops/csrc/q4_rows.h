// A form of `q4_rows`: included once for each, behind q4_tile.h, `signed_at`, `nibbles` (the high and the low halves of
// bytes, each a `Half`), `dot_half` and `of_groups` (a factor for each group, in the lanes that its sums are in).
static void q4_rows(const Matrix& w, int64_t begin, int64_t end, const int8_t* q, const float* factors,
                    const float* x_sums, float* sums) {
  constexpr int64_t kAtOnce = kSumLanes / 4, kBytes = kQ4Group / 2;  // groups of a vector; bytes of a group
  const int64_t groups = w.inputs / kQ4Group;
  const int8_t* odds = q + padded_groups(w) * kBytes;
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + row * groups * kBytes;
    Floats acc = Floats{};
    for (int64_t first = 0; first < groups; first += kHalves) {
      const int64_t count = groups - first < kHalves ? groups - first : kHalves;
      float scales[kHalves], lows[kHalves];
      floats_of_halves(w.halves + row * groups + first, count, scales);
      floats_of_halves(w.minima + row * groups + first, count, lows);
      for (int64_t i = 0; i < kHalves; i += kSumLanes) {
        Floats scale, factor, low, x_sum;
        std::memcpy(&scale, scales + i, sizeof scale);
        std::memcpy(&factor, factors + first + i, sizeof factor);
        std::memcpy(&low, lows + i, sizeof low);
        std::memcpy(&x_sum, x_sums + first + i, sizeof x_sum);
        scale *= factor;
        std::memcpy(scales + i, &scale, sizeof scale);
        acc += low * x_sum;
      }
      for (int64_t group = 0; group < count; group += kAtOnce) {
        const int64_t at = (first + group) * kBytes;
        const uint8_t* from = bytes + at;
        uint8_t last[kAtOnce * kBytes];
        // What is read of the row behind this one meets zeros; behind the last row memory may end.
        if (count - group < kAtOnce && row + kAtOnce >= w.outputs) {
          std::memset(last, 0, sizeof last);
          std::memcpy(last, from, static_cast<size_t>((count - group) * kBytes));
          from = last;
        }
        Half high, low;
        nibbles(from, high, low);
        const Part part = dot_half(dot_half(Part{}, signed_at(q + at), high), signed_at(odds + at), low);
        acc += __builtin_convertvector(whole(part), Floats) * of_groups(scales + group);
      }
    }
    float sum = 0.0f;
    for (int lane = 0; lane < kSumLanes; ++lane) sum += acc[lane];
    sums[row - begin] = sum;
  }
}
