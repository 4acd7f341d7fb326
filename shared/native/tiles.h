// Intel's matrix extension (AMX): 16 x 16 sums over 32 bfloat16 products at a time.
//
// Panels have the layout of its tiles: rows of 16 units.
#pragma once

#include "units.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define PAGEMILL_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define PAGEMILL_TILES 0
#endif

namespace pagemill {

constexpr int kTileSide = 16;
// With fewer rows, a product is limited by memory bandwidth in any case.
constexpr int kMinTileRows = 9;

#if PAGEMILL_TILES

// Requests permission from Linux, once per process; see its Documentation/arch/x86/xstate.rst.
inline bool have_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// Configures the tiles of the current thread while in scope: all eight have 16 rows of 64 bytes.
class TileScope {
 public:
  TileScope() {
    if (!have_tiles()) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = kTileSide;
    }
    _tile_loadconfig(&config);
  }
  ~TileScope() {
    if (have_tiles()) _tile_release();
  }
};

// Computes sums of 32 rows x 32 outputs. The memory of 32 rows, or 16 with `short_rows`, must be readable.
inline void multiply_tiles(const uint32_t* rows, size_t row_units, const uint32_t* panel, int units, bool short_rows,
                           float (*sums)[2][kTileSide]) {
  constexpr int kPanelBytes = 2 * kTileSide * sizeof(uint32_t), kSumBytes = 2 * kTileSide * sizeof(float);
  // Prefetch distance: far enough for the memory latency, near enough to stay in the L1 cache.
  constexpr int kAhead = 2 * kTileSide * 2 * kTileSide;
  const int row_bytes = int(row_units * sizeof(uint32_t));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int unit = 0; unit < units; unit += kTileSide) {
    const uint32_t* weights = panel + size_t(unit) * 2 * kTileSide;
    for (int line = 0; line < 2 * kTileSide; ++line) _mm_prefetch(weights + kAhead + line * kTileSide, _MM_HINT_T0);
    _tile_loadd(4, rows + unit, row_bytes);
    _tile_loadd(6, weights, kPanelBytes);
    _tile_loadd(7, weights + kTileSide, kPanelBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!short_rows) {
      _tile_loadd(5, rows + kTileSide * row_units + unit, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0][0], kSumBytes);
  _tile_stored(1, sums[0][1], kSumBytes);
  _tile_stored(2, sums[kTileSide][0], kSumBytes);
  _tile_stored(3, sums[kTileSide][1], kSumBytes);
}

#else

inline bool have_tiles() { return false; }
class TileScope {
 public:
  TileScope() {}
};
inline void multiply_tiles(const uint32_t*, size_t, const uint32_t*, int, bool, float (*)[2][kTileSide]) {}

#endif

}  // namespace pagemill
