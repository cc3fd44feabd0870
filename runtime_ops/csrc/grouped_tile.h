// A form of the tiles `q8_tile` and `q4_tile`: included once for each kind of processor, behind `Sums` (a vector of
// kSumLanes int32) and the structs `LiftedBits` (8 bits) and `FourBits`. Each has `Weights` (4 k of kSumLanes columns), `Four` (4 k
// of a row in every lane), `Part` (what 32 products of a column are added up in), `weights`, `four`, `dot`, `whole`,
// kLifts (whether kLift is added to each level), and kTall rows by kWide vectors that stay in registers.
typedef float Floats __attribute__((vector_size(sizeof(Sums))));

template <typename Form, int Tall>
static inline void some_rows(const GroupedRows& x, int64_t row, const int8_t* panel, const float* scales,
                             int64_t groups, float* sums) {
  constexpr int kWide = Form::kWide;
  const int8_t* q = x.levels + row * x.stride;
  for (int64_t column = 0; column < kColumns; column += kWide * kSumLanes) {
    Floats acc[Tall][kWide];
    for (int i = 0; i < Tall; ++i) {
      for (int j = 0; j < kWide; ++j) acc[i][j] = Floats{};
    }
    const int8_t* from = panel + 4 * column;
    for (int64_t group = 0; group < groups; ++group) {
      typename Form::Part parts[Tall][kWide];
#pragma GCC unroll 8
      for (int i = 0; i < Tall; ++i) {
        typename Form::Part start{};
        if constexpr (Form::kLifts) start += x.lifts[(row + i) * x.groups + group];
#pragma GCC unroll 8
        for (int j = 0; j < kWide; ++j) parts[i][j] = start;
      }
      for (int64_t quad = 0; quad < kQ4Group / 4; ++quad, from += 4 * kColumns) {
        typename Form::Weights weights[kWide];
#pragma GCC unroll 8
        for (int j = 0; j < kWide; ++j) weights[j] = Form::weights(from + 4 * kSumLanes * j);
#pragma GCC unroll 8
        for (int i = 0; i < Tall; ++i) {
          const typename Form::Four value = Form::four(q + i * x.stride + kQ4Group * group + 4 * quad);
#pragma GCC unroll 8
          for (int j = 0; j < kWide; ++j) parts[i][j] = Form::dot(parts[i][j], value, weights[j]);
        }
      }
#pragma GCC unroll 8
      for (int j = 0; j < kWide; ++j) {
        Floats scale;
        if (scales) std::memcpy(&scale, scales + group * kColumns + column + kSumLanes * j, sizeof scale);
#pragma GCC unroll 8
        for (int i = 0; i < Tall; ++i) {
          const Floats product = __builtin_convertvector(Form::whole(parts[i][j]), Floats);
          const float factor = x.scales[(row + i) * x.groups + group];
          acc[i][j] += scales ? product * scale * factor : product * factor;
        }
      }
    }
    for (int i = 0; i < Tall; ++i) std::memcpy(sums + i * kColumns + column, acc[i], sizeof acc[i]);
  }
}

template <typename Form, int Tall>
static inline void rows_left(int64_t rows, const GroupedRows& x, int64_t row, const int8_t* panel, const float* scales,
                             int64_t groups, float* sums) {
  if constexpr (Tall > 0) {
    if (rows == Tall) {
      some_rows<Form, Tall>(x, row, panel, scales, groups, sums);
    } else {
      rows_left<Form, Tall - 1>(rows, x, row, panel, scales, groups, sums);
    }
  }
}

template <typename Form>
static inline void all_rows(const GroupedRows& x, int64_t rows, const int8_t* panel, const float* scales,
                            int64_t groups, float* sums) {
  int64_t row = 0;
  for (; row + Form::kTall <= rows; row += Form::kTall) {
    some_rows<Form, Form::kTall>(x, row, panel, scales, groups, sums + row * kColumns);
  }
  rows_left<Form, Form::kTall - 1>(rows - row, x, row, panel, scales, groups, sums + row * kColumns);
}

static constexpr bool kLifts = LiftedBits::kLifts;

static void q8_tile(const GroupedRows& x, int64_t rows, const int8_t* panel, int64_t groups, float* sums) {
  all_rows<LiftedBits>(x, rows, panel, nullptr, groups, sums);
}

static void q4_tile(const GroupedRows& x, int64_t rows, const int8_t* panel, const float* scales, int64_t groups,
                    float* sums) {
  all_rows<FourBits>(x, rows, panel, scales, groups, sums);
}
