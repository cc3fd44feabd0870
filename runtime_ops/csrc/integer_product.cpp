// Products of integers: which form multiplies, and the panels that it multiplies with; see integer_product.h.
#include <cstdlib>

#include "integer_forms.h"

namespace ondevice {
namespace {

const IntegerForm& chosen_form() {
  const char* wanted = std::getenv("ONDEVICE_INTEGERS");
  const IntegerForm* first = nullptr;
  for (const IntegerForm& form : kForms) {
    if (!form.available()) continue;
    if (wanted && std::strcmp(wanted, form.name) == 0) return form;
    if (!first) first = &form;
  }
  return *first;
}

}  // namespace

const IntegerForm* integer_forms(int* count) {
  *count = static_cast<int>(sizeof kForms / sizeof kForms[0]);
  return kForms;
}

const IntegerForm& integer_form() {
  static const IntegerForm& form = chosen_form();
  return form;
}

namespace {

typedef int8_t Signs __attribute__((vector_size(16)));
typedef int32_t SixteenInts __attribute__((vector_size(64)));

// W[row, column .. column + 32) in 8 bits with the row's scale, `w.scales[row]`.
void q4_row_in_8_bits(const Matrix& w, int64_t row, int64_t column, int8_t* out) {
  const int64_t group = row * (w.inputs / kQ4Group) + column / kQ4Group;
  const float inverse = 1.0f / w.scales[row];
  const float scale = float_of_half(w.halves[group]) * inverse;
  const float low = float_of_half(w.minima[group]) * inverse + 128.5f;  // truncation of what is positive rounds
  float values[kQ4Group];
  q4_levels(static_cast<const uint8_t*>(w.data) + (row * w.inputs + column) / 2, values);
  for (int half = 0; half < 2; ++half) {
    Sixteen level;
    std::memcpy(&level, values + 16 * half, sizeof level);
    const SixteenInts ints = __builtin_convertvector(level * scale + low, SixteenInts) - 128;
    const Signs bytes = __builtin_convertvector(ints, Signs);
    std::memcpy(out + 16 * half, &bytes, sizeof bytes);
  }
}

// 16 bytes of each of four rows as 16 columns of a quad; `flipped` changes bits of each.
void interleave_four(const int8_t* const rows[4], int8_t flipped, int8_t* out) {
  Signs r[4];
  for (int k = 0; k < 4; ++k) {
    std::memcpy(&r[k], rows[k], sizeof r[k]);
    r[k] ^= flipped;
  }
  for (int half = 0; half < 2; ++half) {
    typedef int16_t Pairs __attribute__((vector_size(16)));
    Signs bytes[2];
    for (int k = 0; k < 2; ++k) {
      const Signs a = r[2 * k], b = r[2 * k + 1];
      bytes[k] = half ? __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
                      : __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    }
    const Pairs one = (Pairs)bytes[0], two = (Pairs)bytes[1];
    const Pairs low = __builtin_shufflevector(one, two, 0, 8, 1, 9, 2, 10, 3, 11);
    const Pairs high = __builtin_shufflevector(one, two, 4, 12, 5, 13, 6, 14, 7, 15);
    std::memcpy(out + 32 * half, &low, sizeof low);
    std::memcpy(out + 32 * half + 16, &high, sizeof high);
  }
}

// 4 `quads` times kColumns levels with kLift more in each, behind their packing, while they are near.
void lift(int8_t* levels, int64_t quads) {
  for (int64_t i = 0; i < 4 * quads * kColumns; ++i) levels[i] ^= static_cast<int8_t>(kLift);
}

}  // namespace

void pack_q4(const Matrix& w, int64_t column, int64_t columns, int64_t first, int64_t depth, int8_t* panel,
             float* scales, float* minima) {
  const int64_t groups = depth / kQ4Group, of_row = w.inputs / kQ4Group;
  if (columns < kColumns) {
    std::memset(panel, 0, static_cast<size_t>(depth * kColumns));
    std::memset(scales, 0, sizeof(float) * static_cast<size_t>(groups * kColumns));
    std::memset(minima, 0, sizeof(float) * static_cast<size_t>(groups * kColumns));
  }
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t at = (column + j) * of_row + first / kQ4Group + group;
      scales[group * kColumns + j] = float_of_half(w.halves[at]);
      minima[group * kColumns + j] = float_of_half(w.minima[at]);
      Bytes both;
      std::memcpy(&both, static_cast<const uint8_t*>(w.data) + at * (kQ4Group / 2), sizeof both);
      const Bytes high = both >> 4, low = both & 15;
      const Bytes one = __builtin_shufflevector(high, low, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const Bytes two =
          __builtin_shufflevector(high, low, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      uint32_t quads[kQ4Group / 4];
      std::memcpy(quads, &one, sizeof one);
      std::memcpy(quads + 4, &two, sizeof two);
      int8_t* to = panel + group * kQ4Group * kColumns + 4 * j;
      for (int quad = 0; quad < kQ4Group / 4; ++quad) std::memcpy(to + 4 * quad * kColumns, quads + quad, 4);
    }
  }
}

void pack_integers(const Matrix& w, bool transposed, int64_t column, int64_t columns, int64_t first, int64_t depth,
                   bool lifted, int8_t* panel) {
  const int64_t quads = (depth + kQ4Group - 1) / kQ4Group * (kQ4Group / 4);
  const int8_t* levels = static_cast<const int8_t*>(w.data);
  const bool four_bits = w.kind == Matrix::kQ4;
  // kLift more is another sign. In registers, as wide loads of what narrow stores have just written wait for them.
  const int8_t flipped = lifted ? static_cast<int8_t>(kLift) : 0;
  if (!transposed) {
    const bool whole = columns == kColumns;
    if (columns < kColumns || depth % kQ4Group) std::memset(panel, 0, static_cast<size_t>(4 * quads * kColumns));
    // Blocks of 16 quads, so that the panel's cache lines are written while they are near.
    for (int64_t low = 0; low < depth / 4; low += 16) {
      const int64_t some = low + 16 < depth / 4 ? 16 : depth / 4 - low;
      for (int64_t j = 0; j < columns; j += 4) {
        const int8_t* row = levels + (column + j) * w.inputs + first + 4 * low;
        int8_t* to = panel + 4 * (low * kColumns + j);
        if (j + 4 <= columns) {
          // The next panel's, while there is time.
          for (int64_t i = 0; i < 4; ++i) ask_for(w.address(column + kColumns + j + i, first + 4 * low), 4 * some);
          const void* const rows[4] = {row, row + w.inputs, row + 2 * w.inputs, row + 3 * w.inputs};
          if (lifted && whole) {
            transpose_words<0x80808080>(rows, some, to, kColumns);
          } else {
            transpose_words(rows, some, to, kColumns);
          }
          continue;
        }
        for (int64_t i = 0; j + i < columns; ++i) {
          for (int64_t k = 0; k < some; ++k) std::memcpy(to + 4 * (k * kColumns + i), row + i * w.inputs + 4 * k, 4);
        }
      }
      if (lifted && !whole) lift(panel + 4 * low * kColumns, some);
    }
    for (int64_t k = depth / 4 * 4; k < depth; ++k) {
      for (int64_t j = 0; j < columns; ++j) {
        panel[4 * (k / 4 * kColumns + j) + k % 4] = levels[(column + j) * w.inputs + first + k];
      }
    }
    if (lifted && depth % 4) lift(panel + 4 * (depth / 4) * kColumns, 1);
    return;
  }
  int8_t copies[4][kColumns];
  for (int64_t quad = 0; quad < quads; ++quad) {
    const int8_t* rows[4];
    for (int64_t k = 0; k < 4; ++k) {
      const int64_t row = 4 * quad + k;
      const int8_t* from = levels + (first + row) * w.inputs + column;
      rows[k] = copies[k];
      if (row < depth && four_bits) {
        q4_row_in_8_bits(w, first + row, column, copies[k]);
      } else if (row < depth && columns == kColumns) {
        ask_for(w.address(first + row + kRowsAhead, column), kColumns);
        rows[k] = from;
      } else {
        std::memset(copies[k], 0, kColumns);
        if (row < depth) std::memcpy(copies[k], from, static_cast<size_t>(columns));
      }
    }
    for (int64_t half = 0; half < 2; ++half) {
      const int8_t* const some[4] = {rows[0] + 16 * half, rows[1] + 16 * half, rows[2] + 16 * half,
                                     rows[3] + 16 * half};
      interleave_four(some, flipped, panel + 4 * (quad * kColumns + 16 * half));
    }
  }
}

}  // namespace ondevice
