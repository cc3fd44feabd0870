// A form of `q4_tile`: included once for each, behind `Sums`, `Part` (what 32 products of a column are added up in),
// `Levels`, `Signed`, `levels_at`, `spread_signed`, `dot_levels`, `whole`, and kGroupTall rows by kGroupWide vectors
// that stay in registers, all for one kind of processor.
typedef float Floats __attribute__((vector_size(sizeof(Sums))));

template <int Tall>
static inline void some_grouped_rows(const int8_t* q, int64_t stride, const float* factors, int64_t groups_of_row,
                                     const int8_t* panel, const float* scales, int64_t groups, float* sums) {
  for (int64_t column = 0; column < kColumns; column += kGroupWide * kSumLanes) {
    Floats acc[Tall][kGroupWide];
    for (int i = 0; i < Tall; ++i) {
      for (int j = 0; j < kGroupWide; ++j) acc[i][j] = Floats{};
    }
    const int8_t* from = panel + 4 * column;
    for (int64_t group = 0; group < groups; ++group) {
      Part parts[Tall][kGroupWide];
#pragma GCC unroll 8
      for (int i = 0; i < Tall; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kGroupWide; ++j) parts[i][j] = Part{};
      }
      for (int64_t quad = 0; quad < kQ4Group / 4; ++quad, from += 4 * kColumns) {
        Levels levels[kGroupWide];
#pragma GCC unroll 8
        for (int j = 0; j < kGroupWide; ++j) levels[j] = levels_at(from + 4 * kSumLanes * j);
#pragma GCC unroll 8
        for (int i = 0; i < Tall; ++i) {
          int32_t four;
          std::memcpy(&four, q + i * stride + kQ4Group * group + 4 * quad, sizeof four);
          const Signed value = spread_signed(four);
#pragma GCC unroll 8
          for (int j = 0; j < kGroupWide; ++j) parts[i][j] = dot_levels(parts[i][j], value, levels[j]);
        }
      }
#pragma GCC unroll 8
      for (int j = 0; j < kGroupWide; ++j) {
        Floats scale;
        std::memcpy(&scale, scales + group * kColumns + column + kSumLanes * j, sizeof scale);
#pragma GCC unroll 8
        for (int i = 0; i < Tall; ++i) {
          const float factor = factors[i * groups_of_row + group];
          acc[i][j] += __builtin_convertvector(whole(parts[i][j]), Floats) * scale * factor;
        }
      }
    }
    for (int i = 0; i < Tall; ++i) std::memcpy(sums + i * kColumns + column, acc[i], sizeof acc[i]);
  }
}

template <int Tall>
static inline void grouped_rows_left(int64_t rows, const int8_t* q, int64_t stride, const float* factors,
                                     int64_t groups_of_row, const int8_t* panel, const float* scales, int64_t groups,
                                     float* sums) {
  if constexpr (Tall > 0) {
    if (rows == Tall) {
      some_grouped_rows<Tall>(q, stride, factors, groups_of_row, panel, scales, groups, sums);
    } else {
      grouped_rows_left<Tall - 1>(rows, q, stride, factors, groups_of_row, panel, scales, groups, sums);
    }
  }
}

static void q4_tile(const int8_t* q, int64_t stride, const float* factors, int64_t groups_of_row, int64_t rows,
                    const int8_t* panel, const float* scales, int64_t groups, float* sums) {
  for (; rows >= kGroupTall; rows -= kGroupTall) {
    some_grouped_rows<kGroupTall>(q, stride, factors, groups_of_row, panel, scales, groups, sums);
    q += kGroupTall * stride;
    factors += kGroupTall * groups_of_row;
    sums += kGroupTall * kColumns;
  }
  grouped_rows_left<kGroupTall - 1>(rows, q, stride, factors, groups_of_row, panel, scales, groups, sums);
}
