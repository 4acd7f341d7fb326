// y = f(x W^T + b) for weights that are packed once, with the activations f of vision towers.
#pragma once

#include "linear.h"

namespace pagemill {

// The values equal the ones of ACTIVATIONS in tower_kernels.py.
enum class Activation : int32_t { kNone, kQuickGelu, kGelu, kGeluTanh, kSilu };

struct Product {
  const void* x;           // [num_rows, num_inputs]
  Matrix weights;          // [num_outputs, num_inputs]
  const float* bias;       // [num_outputs, rounded up to whole panels]
  void* y;                 // [num_rows, num_outputs]
  int32_t num_rows, num_inputs, num_outputs;
  Activation activation;
  int32_t min_tile_rows;  // tiles read the memory of at least 16 rows of x, and none after the last row
};

// GELU: x / 2 * (1 + erf(x / sqrt 2)) with an error of at most 1e-7 |x|, by Abramowitz and Stegun, 7.1.26.
inline __m512 gelu16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 z = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678118654752f));
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), one));
  __m512 p = _mm512_set1_ps(1.061405429f);
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
  const __m512 power = exp16(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(z, z)));
  // erfc(|z|) / 2 is the share of x that remains if x is negative, and the share removed otherwise.
  const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, t), _mm512_mul_ps(power, _mm512_set1_ps(0.5f)));
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_mul_ps(x, _mm512_mask_mov_ps(_mm512_sub_ps(one, tail), negative, tail));
}

inline __m512 activate(Activation activation, __m512 x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kQuickGelu:
      return _mm512_mul_ps(x, sigmoid16(_mm512_mul_ps(x, _mm512_set1_ps(1.702f))));
    case Activation::kGelu:
      return gelu16(x);
    case Activation::kGeluTanh: {
      // (1 + tanh u) / 2 is the sigmoid of 2u; u = sqrt(2 / pi) (x + 0.044715 x^3).
      const __m512 factor = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.0713548162726f), _mm512_set1_ps(1.5957691216057308f));
      return _mm512_mul_ps(x, sigmoid16(_mm512_mul_ps(x, factor)));
    }
    case Activation::kSilu:
      return _mm512_mul_ps(x, sigmoid16(x));
  }
  __builtin_unreachable();
}

template <class T>
void multiply_product(Member member, const Product& product) {
  const int units = product.num_inputs / Unit<T>::kSize;
  // The last of several blocks may have fewer than 16 rows, and no memory after them.
  const int min_tile_rows = product.num_rows < kTileSide ? product.min_tile_rows : std::max(product.min_tile_rows, kTileSide);
  const Linear linear{product.weights, units, padded(product.num_outputs, kPanel) / kPanel, product.num_outputs,
                      min_tile_rows};
  const auto* x = static_cast<const T*>(product.x);
  auto* y = static_cast<T*>(product.y);
  multiply(member, x, product.num_rows, linear, [&](int row, int panel, __m512 low, __m512 high) {
    const int first = panel * kPanel;
    low = activate(product.activation, _mm512_add_ps(low, load16(product.bias + first)));
    high = activate(product.activation, _mm512_add_ps(high, load16(product.bias + first + kLanes)));
    store32(y + size_t(row) * product.num_outputs + first, product.num_outputs - first, low, high);
  });
}

}  // namespace pagemill
