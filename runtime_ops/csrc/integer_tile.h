// A form of `integer_tile`: included once for each, behind `Sums` (a vector of kSumLanes int32), `dot` and kTall
// rows by kWide vectors that stay in registers, all for one kind of processor.
template <int Tall>
static inline void some_rows(const uint8_t* u, int64_t stride, const int8_t* panel, int64_t quads, int32_t* sums) {
  for (int64_t column = 0; column < kColumns; column += kWide * kSumLanes) {
    Sums acc[Tall][kWide];
    for (int i = 0; i < Tall; ++i) {
      for (int j = 0; j < kWide; ++j) acc[i][j] = Sums{};
    }
    const int8_t* from = panel + 4 * column;
    for (int64_t quad = 0; quad < quads; ++quad, from += 4 * kColumns) {
      Packed weights[kWide];
#pragma GCC unroll 8
      for (int j = 0; j < kWide; ++j) weights[j] = unpack(from + 4 * kSumLanes * j);
#pragma GCC unroll 16
      for (int i = 0; i < Tall; ++i) {
        int32_t four;
        std::memcpy(&four, u + i * stride + 4 * quad, sizeof four);
        const Activation value = spread(four);
#pragma GCC unroll 8
        for (int j = 0; j < kWide; ++j) acc[i][j] = dot(acc[i][j], value, weights[j]);
      }
    }
    for (int i = 0; i < Tall; ++i) std::memcpy(sums + i * kColumns + column, acc[i], sizeof acc[i]);
  }
}

template <int Tall>
static inline void rows_left(int64_t rows, const uint8_t* u, int64_t stride, const int8_t* panel, int64_t quads,
                             int32_t* sums) {
  if constexpr (Tall > 0) {
    if (rows == Tall) {
      some_rows<Tall>(u, stride, panel, quads, sums);
    } else {
      rows_left<Tall - 1>(rows, u, stride, panel, quads, sums);
    }
  }
}

static void tile(const uint8_t* u, int64_t stride, int64_t rows, const int8_t* panel, int64_t quads, int32_t* sums) {
  for (; rows >= kTall; rows -= kTall, u += kTall * stride, sums += kTall * kColumns) {
    some_rows<kTall>(u, stride, panel, quads, sums);
  }
  rows_left<kTall - 1>(rows, u, stride, panel, quads, sums);
}
