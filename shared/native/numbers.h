// Weights as numbers of 8 or 4 bits, with a scale for each output and each group of inputs. The kernels
// convert the numbers to floats in registers, where they are exact, and scale the sums of each group.
#pragma once

#include "units.h"

namespace pagemill {

constexpr int kPanel = 32;

// The values equal the ones of FORMATS in packed_weights.py.
enum class Format : int32_t { kFull, kInt8, kFp8, kInt4, kInt4Zeros };

// Weights [num_outputs, num_inputs] in panels of 32 outputs.
struct Matrix {
  const void* panels;   // [num_panels][units][kPanel], or [num_panels][num_inputs][kPanel] numbers
  const float* scales;  // [num_panels][num_groups][kPanel]; null for full weights
  const float* zeros;   // the same; null for formats without zeros
  int32_t format;
  int32_t group_size;  // inputs that share a scale, a multiple of 32
};

// The floats of 16 outputs, from `lane` on, for one input of a panel.
struct Int8 {
  static constexpr int kBits = 8;

  explicit Int8(const float*) {}
  __m512 load(const uint8_t* panel, int input, int lane) const {
    const auto* from = reinterpret_cast<const __m128i*>(panel + size_t(input) * kPanel + lane);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
  }
};

// Floats of 8 bits with 4 bits of exponent and 3 of mantissa, 256 times too small: shifted by 7, their bits are those
// of a half-precision float, whose exponent has another bias. Unlike the instructions for floats, its conversion is
// fast for numbers without a leading one.
struct Fp8 {
  static constexpr int kBits = 8;

  explicit Fp8(const float*) {}
  __m512 load(const uint8_t* panel, int input, int lane) const {
    const auto* from = reinterpret_cast<const __m128i*>(panel + size_t(input) * kPanel + lane);
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(from)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbfff))));
  }
};

// Integers from 0 to 15 for -8 to 7. A byte has two adjacent inputs of an output, the first one in the lower half.
template <bool kZeros>
struct Int4 {
  static constexpr int kBits = 4;

  explicit Int4(const float* zeros) {
    if constexpr (kZeros) {
      zeros_[0] = load16(zeros);
      zeros_[1] = load16(zeros + kLanes);
    }
  }
  __m512 load(const uint8_t* panel, int input, int lane) const {
    const auto* from = reinterpret_cast<const __m128i*>(panel + size_t(input / 2) * kPanel + lane);
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(from));
    // The permutation ignores the other bits of an index.
    const __m512 values = _mm512_permutexvar_ps(_mm512_srl_epi32(pairs, _mm_cvtsi32_si128(input % 2 * 4)), values_);
    return kZeros ? _mm512_sub_ps(values, zeros_[lane / kLanes]) : values;
  }

 private:
  __m512 values_ = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  __m512 zeros_[2];
};

// Panels have the same interface: `load` returns 16 units from `lane` on.
template <class T>
struct FullPanel {
  const uint32_t* units = nullptr;

  typename Unit<T>::Operand load(int unit, int lane) const { return Unit<T>::load(units + size_t(unit) * kPanel + lane); }
  void prefetch(int unit) const {
    _mm_prefetch(units + size_t(unit) * kPanel, _MM_HINT_T1);
    _mm_prefetch(units + size_t(unit) * kPanel + kLanes, _MM_HINT_T1);
  }
};

// The sums of rows with the 32 outputs of a panel, to which the sums of its groups are added.
struct ScaledSums {
  float (*rows)[kPanel];
  const float* scales;  // of the group
  bool is_first;

  void add(int row, __m512 low, __m512 high) const {
    float* to = rows[row];
    const __m512 low_scale = load16(scales), high_scale = load16(scales + kLanes);
    store16(to, is_first ? _mm512_mul_ps(low, low_scale) : _mm512_fmadd_ps(low, low_scale, load16(to)));
    to += kLanes;
    store16(to, is_first ? _mm512_mul_ps(high, high_scale) : _mm512_fmadd_ps(high, high_scale, load16(to)));
  }
};

// A group of a panel.
template <class T, class Number>
struct NumberPanel {
  static constexpr int kUnitBytes = Unit<T>::kSize * kPanel * Number::kBits / 8;

  const uint8_t* bytes;
  const float* scales;
  Number number;

  NumberPanel(const Matrix& matrix, int num_inputs, int panel, int group)
      : NumberPanel(matrix, size_t(panel) * num_inputs + size_t(group) * matrix.group_size,
                    (size_t(panel) * ((num_inputs + matrix.group_size - 1) / matrix.group_size) + group) * kPanel) {}

  typename Unit<T>::Operand load(int unit, int lane) const {
    __m512 values[Unit<T>::kSize];
    convert(unit, lane, values);
    return Unit<T>::operand(values);
  }
  __m512i load_full(int unit, int lane) const {
    __m512 values[Unit<T>::kSize];
    convert(unit, lane, values);
    return Unit<T>::units(values);
  }
  // Fetches numbers 4 KiB ahead, because the processor's own prefetcher stops at the end of each page.
  void prefetch(int unit) const { _mm_prefetch(bytes + size_t(unit) * kUnitBytes + 4096, _MM_HINT_T1); }

 private:
  NumberPanel(const Matrix& matrix, size_t first_row, size_t first_scale)
      : bytes(static_cast<const uint8_t*>(matrix.panels) + first_row * (kPanel * Number::kBits / 8)),
        scales(matrix.scales + first_scale),
        number(matrix.zeros == nullptr ? nullptr : matrix.zeros + first_scale) {}

  void convert(int unit, int lane, __m512* values) const {
    for (int i = 0; i < Unit<T>::kSize; ++i) values[i] = number.load(bytes, unit * Unit<T>::kSize + i, lane);
  }
};

}  // namespace pagemill
