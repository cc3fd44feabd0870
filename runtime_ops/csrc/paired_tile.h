// The tiles `q8_tile` and `q4_tile` by products of two rows with two columns, 8 k at a time (ARM's i8mm): a vector of
// sums is [row][column]. Levels of 4 bits are signed bytes, too.
template <int Pairs>
static inline void some_pairs(const GroupedRows& x, int64_t row, int64_t last, const int8_t* panel, const float* scales,
                              int64_t groups, float* sums) {
  constexpr int64_t kWide = 8;
  const int8_t* q[2 * Pairs];
  const float* factors[2 * Pairs];
  for (int i = 0; i < 2 * Pairs; ++i) {  // an odd row is its own neighbour
    const int64_t at = row + i < last ? row + i : last - 1;
    q[i] = x.levels + at * x.stride;
    factors[i] = x.scales + at * x.groups;
  }
  for (int64_t column = 0; column < kColumns; column += kWide) {
    float32x4_t acc[2 * Pairs][2] = {};
    const int8_t* from = panel + 4 * column;
    for (int64_t group = 0; group < groups; ++group) {
      int32x4_t parts[Pairs][4] = {};
#pragma GCC unroll 4
      for (int64_t k = 0; k < kQ4Group; k += 8, from += 8 * kColumns) {
        int8x16_t weights[4];  // of two columns
        for (int j = 0; j < 2; ++j) {
          const int32x4_t low = vreinterpretq_s32_s8(vld1q_s8(from + 16 * j));
          const int32x4_t high = vreinterpretq_s32_s8(vld1q_s8(from + 4 * kColumns + 16 * j));
          weights[2 * j] = vreinterpretq_s8_s32(vzip1q_s32(low, high));
          weights[2 * j + 1] = vreinterpretq_s8_s32(vzip2q_s32(low, high));
        }
        for (int i = 0; i < Pairs; ++i) {
          const int64_t at = kQ4Group * group + k;
          const int8x16_t two = vcombine_s8(vld1_s8(q[2 * i] + at), vld1_s8(q[2 * i + 1] + at));
          for (int j = 0; j < 4; ++j) parts[i][j] = vmmlaq_s32(parts[i][j], two, weights[j]);
        }
      }
      for (int j = 0; j < 2; ++j) {
        const float32x4_t scale = scales ? vld1q_f32(scales + group * kColumns + column + 4 * j) : vdupq_n_f32(1.0f);
        for (int i = 0; i < Pairs; ++i) {
          const int64x2_t low = vreinterpretq_s64_s32(parts[i][2 * j]), high = vreinterpretq_s64_s32(parts[i][2 * j + 1]);
          const float32x4_t above = vcvtq_f32_s32(vreinterpretq_s32_s64(vzip1q_s64(low, high)));
          const float32x4_t below = vcvtq_f32_s32(vreinterpretq_s32_s64(vzip2q_s64(low, high)));
          acc[2 * i][j] += above * scale * factors[2 * i][group];
          acc[2 * i + 1][j] += below * scale * factors[2 * i + 1][group];
        }
      }
    }
    for (int i = 0; i < 2 * Pairs && row + i < last; ++i) {
      for (int j = 0; j < 2; ++j) vst1q_f32(sums + (row + i) * kColumns + column + 4 * j, acc[i][j]);
    }
  }
}

static void q4_tile(const GroupedRows& x, int64_t rows, const int8_t* panel, const float* scales, int64_t groups,
                    float* sums) {
  int64_t row = 0;
  for (; row + 4 < rows; row += 6) some_pairs<3>(x, row, rows, panel, scales, groups, sums);
  for (; row < rows; row += 2) some_pairs<1>(x, row, rows, panel, scales, groups, sums);
}

static constexpr bool kLifts = false;

static void q8_tile(const GroupedRows& x, int64_t rows, const int8_t* panel, int64_t groups, float* sums) {
  q4_tile(x, rows, panel, nullptr, groups, sums);
}
