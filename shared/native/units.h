// Units of four bytes, in which the kernels read numbers: one float, or two bfloat16 that are adjacent
// along the summed dimension. A vector register holds 16 units. One instruction adds all their products,
// except for bfloat16 on a processor without AVX-512 BF16, which converts them to floats. The other files
// do not depend on the type.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pagemill {

constexpr int kLanes = 16;

inline int padded(int size, int multiple) { return (size + multiple - 1) / multiple * multiple; }

struct BF16 {
  uint16_t bits;
};

inline float to_float(BF16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline float to_float(float value) { return value; }

inline void from_float(float value, float& out) { out = value; }
inline void from_float(float value, BF16& out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  // Rounds to nearest, ties to even; NaN stays NaN.
  out.bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
inline void store16(float* to, __m512 values) { _mm512_storeu_ps(to, values); }

inline __m512i load_units(const uint32_t* from) { return _mm512_loadu_si512(from); }

// An `Operand` is 16 units in the form in which `dot` reads them.
template <class T>
struct Unit;

template <>
struct Unit<float> {
  static constexpr int kSize = 1;
  using Operand = __m512;

  static Operand load(const uint32_t* units) { return _mm512_castsi512_ps(load_units(units)); }
  static Operand repeat(uint32_t unit) { return _mm512_castsi512_ps(_mm512_set1_epi32(int(unit))); }
  static Operand combine(__m256i low, __m256i high) {
    return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  // The units, or the operand, of kSize floats for each of 16 outputs.
  static __m512i units(const __m512* floats) { return _mm512_castps_si512(floats[0]); }
  static Operand operand(const __m512* floats) { return floats[0]; }
  static __m512 dot(__m512 sum, Operand a, Operand b) { return _mm512_fmadd_ps(a, b, sum); }
  // Writes 16 numbers into 16 units, at the same position in each.
  static void place(uint32_t* units, const float* from, int) { _mm512_storeu_si512(units, _mm512_loadu_si512(from)); }
};

template <>
struct Unit<BF16> {
  static constexpr int kSize = 2;

#ifdef __AVX512BF16__
  using Operand = __m512i;

  static Operand from_units(__m512i units) { return units; }
  static Operand operand(const __m512* floats) { return units(floats); }
  static __m512 dot(__m512 sum, Operand a, Operand b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
#else
  // A bfloat16 is the upper half of a float.
  struct Operand {
    __m512 first, second;
  };

  static Operand from_units(__m512i units) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(units, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(units, _mm512_set1_epi32(int(0xffff0000))))};
  }
  static Operand operand(const __m512* floats) { return {floats[0], floats[1]}; }
  static __m512 dot(__m512 sum, Operand a, Operand b) {
    return _mm512_fmadd_ps(a.second, b.second, _mm512_fmadd_ps(a.first, b.first, sum));
  }
#endif

  // The floats must be exact in bfloat16.
  static __m512i units(const __m512* floats) {
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(floats[0]), 16), _mm512_castps_si512(floats[1]));
  }
  static Operand load(const uint32_t* units) { return from_units(load_units(units)); }
  static Operand repeat(uint32_t unit) { return from_units(_mm512_set1_epi32(int(unit))); }
  static Operand combine(__m256i low, __m256i high) {
    return from_units(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  static void place(uint32_t* units, const BF16* from, int place) {
    const __m512i numbers = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i both = _mm512_or_si512(numbers, _mm512_slli_epi32(numbers, 16));
    _mm512_mask_storeu_epi16(units, 0x55555555u << place, both);
  }
};

// Rounds to nearest, ties to even; NaN stays NaN.
inline __m256i round16(__m512 values) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(values);
#else
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
#endif
}

inline __m512 load16(const BF16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void store16(BF16* to, __m512 values) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round16(values)); }

inline void store_all(float* to, __m512 low, __m512 high) {
  store16(to, low);
  store16(to + kLanes, high);
}
inline void store_all(BF16* to, __m512 low, __m512 high) {
#ifdef __AVX512BF16__
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
  store16(to, low);
  store16(to + kLanes, high);
#endif
}

// Stores the first `count` of 32 numbers. It avoids the stack where possible: a load that spans two
// recent stores stalls until both have completed.
template <class T>
inline void store32(T* to, int count, __m512 low, __m512 high) {
  if (count >= 2 * kLanes) {
    store_all(to, low, high);
  } else {
    alignas(64) T numbers[2 * kLanes];
    store16(numbers, low);
    store16(numbers + kLanes, high);
    std::memcpy(to, numbers, count * sizeof(T));
  }
}

template <class T>
inline void convert(const float* from, int count, T* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store16(to + i, load16(from + i));
  for (; i < count; ++i) from_float(from[i], to[i]);
}

// e^x for x <= 0 within 2 ulp; 0 for x below -87, where e^x is subnormal. The method follows expf of
// Cephes: x = n ln 2 + r, and a polynomial of degree 5 for e^r.
inline __m512 exp16(__m512 x) {
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), tiny, _mm512_setzero_ps());
}

// 2^x for x <= 0 with a relative error of at most 3e-6; 0 for minus infinity. The whole part of x becomes the
// exponent, and a minimax polynomial on [0, 1] takes the rest.
inline __m512 power_of_two(__m512 x) {
  constexpr int kDown = 0x09;  // rounds down, without exceptions
  const __m512 rest = _mm512_reduce_ps(x, kDown);
  __m512 p = _mm512_set1_ps(0.01353417f);
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.05201146f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.24144276f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.69300383f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.00000259f));
  return _mm512_scalef_ps(p, x);
}

// 1 / (1 + e^-x). exp16 requires x <= 0, so e^-|x| is used for both signs.
inline __m512 sigmoid16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 small = exp16(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_div_ps(_mm512_mask_mov_ps(one, negative, small), _mm512_add_ps(one, small));
}

}  // namespace pagemill
