// The matrix extension in software: compiled in front of the kernels, it lets a processor without the
// extension run the code that is for one with it.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

namespace software_tiles {

inline thread_local uint8_t tiles[8][16][64];
inline thread_local bool configured = false;
inline std::atomic<int> num_products{0}, num_unconfigured{0};

inline void configure(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  if (bytes[0] != 1) __builtin_trap();
  for (int tile = 0; tile < 8; ++tile) {
    const bool whole = bytes[16 + 2 * tile] == 64 && bytes[17 + 2 * tile] == 0 && bytes[48 + tile] == 16;
    if (!whole) __builtin_trap();
  }
  configured = true;
}
inline void release() { configured = false; }
// A processor raises an exception for a tile instruction without a configuration.
inline void check() { num_unconfigured += !configured; }
inline void zero(int tile) {
  check();
  std::memset(tiles[tile], 0, sizeof tiles[tile]);
}
inline void load(int tile, const void* from, long stride) {
  check();
  for (int row = 0; row < 16; ++row) std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, 64);
}
inline void store(int tile, void* to, long stride) {
  check();
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], 64);
}
inline float number(int tile, int row, int column) {
  uint16_t half;
  std::memcpy(&half, &tiles[tile][row][2 * column], sizeof half);
  const uint32_t bits = uint32_t{half} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline void multiply_add(int sums, int left, int right) {
  check();
  ++num_products;
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      float sum;
      std::memcpy(&sum, &tiles[sums][row][4 * column], sizeof sum);
      for (int unit = 0; unit < 16; ++unit) {
        for (int i = 0; i < 2; ++i) sum += number(left, row, 2 * unit + i) * number(right, unit, 2 * column + i);
      }
      std::memcpy(&tiles[sums][row][4 * column], &sum, sizeof sum);
    }
  }
}

}  // namespace software_tiles

extern "C" {
inline __attribute__((used)) int num_tile_products() { return software_tiles::num_products; }
inline __attribute__((used)) int num_unconfigured_tiles() { return software_tiles::num_unconfigured; }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) software_tiles::configure(config)
#define _tile_release() software_tiles::release()
#define _tile_zero(tile) software_tiles::zero(tile)
#define _tile_loadd(tile, from, stride) software_tiles::load(tile, from, stride)
#define _tile_stored(tile, to, stride) software_tiles::store(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) software_tiles::multiply_add(sums, left, right)
#define syscall(...) 0L
