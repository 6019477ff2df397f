// Products on the processor's matrix unit (Intel AMX). Weights are packed as in matrix.h.
//
// A tile of the weight contains 16 columns and 32 numbers of each. It has the layout of a panel of
// PairedWeight, so that each step of a panel contains two tiles side by side. A block of up to
// three tiles of rows is multiplied with both, which needs six tiles of sums. The order of a row's
// sum depends neither on the number of rows nor on the row's tile.

#pragma once

#include "matrix.h"

#if defined(__AMX_BF16__)

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace {

constexpr int TILE_ROWS = 16, TILE_DEPTH = 32;
constexpr int TILE_BYTES = 64;  // bytes of each row of a tile, for all types
constexpr int MAX_ROW_TILES = 3;  // tiles of rows in a block
// The intrinsics take tile registers as literal numbers. Registers 0 and 1 hold the sums of the
// first tile of rows with the left and the right tile of the weight. Registers 2 and 3 hold the
// sums of the second tile of rows. With three tiles of rows, registers 4 and 5 hold the sums of the
// third, and register 6 holds the rows. Otherwise, registers 4 and 5 hold the rows. Register 7
// holds the left and then the right tile of the weight.
constexpr int NUM_TILES = 8, WEIGHT_TILE = 7;

// Requests the operating system's permission to use the matrix unit, and returns whether it was
// granted. Linux grants it per process.
inline bool may_use_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return permitted;
}

// A weight of BFloat16 that is multiplied by the matrix unit.
struct TiledWeight : PairedWeight {
    static constexpr int DEPTH = TILE_DEPTH;
    static constexpr int BYTES = TILE_DEPTH / PairedWeight::DEPTH * PairedWeight::BYTES;
};

// The shapes of the tile registers of a thread.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t tile_rows, int64_t tile_bytes) {
        rows[tile] = (uint8_t)tile_rows;
        bytes[tile] = (uint16_t)tile_bytes;
    }

    void load() const {
        __asm__ volatile("" ::: "memory");
        _tile_loadconfig(this);
    }
};

// Configures the tile registers of this thread during its lifetime. Tiles of rows and of sums have
// the given number of rows.
struct TileConfig {
    explicit TileConfig(int rows) {
        TileShapes shapes;
        for (int tile = 0; tile < NUM_TILES; ++tile)
            shapes.set(tile, tile < WEIGHT_TILE ? rows : TILE_ROWS, TILE_BYTES);
        shapes.load();
    }

    ~TileConfig() { _tile_release(); }
};

// The steps of a panel. Each call returns the address of a step and prefetches next_lines cache
// lines of the memory at next.
struct PanelSteps {
    const char *panel, *next;
    int64_t next_lines;

    INLINE_MEMBER const char *operator()(int64_t step) {
        for (int64_t line = 0; line < next_lines; ++line)
            __builtin_prefetch(next + (step * next_lines + line) * CACHE_LINE, 0, 2);
        return panel + step * TiledWeight::BYTES;
    }
};

// Multiplies COUNT tiles of rows with a panel. rows[i] is the start of the i-th tile. panel(step)
// returns the address of a step; it is called once for each step, in ascending order.
template <int COUNT, class Panel>
INLINE void multiply_tiles(const BFloat16 *const *rows, int64_t stride, int64_t steps,
                           Panel &panel, float *sums) {
    const int64_t row_bytes = stride * (int64_t)sizeof **rows;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (COUNT == 3) {
        _tile_zero(4);
        _tile_zero(5);
    }
    __asm__ volatile("" ::: "memory");  // tile loads read memory unknown to the compiler
    for (int64_t step = 0; step < steps; ++step) {
        const char *left = panel(step), *right = left + TILE_BYTES;
        const int64_t column = step * TILE_DEPTH;
        if (COUNT == 3) {
            _tile_loadd(7, left, 2 * TILE_BYTES);
            _tile_loadd(6, rows[0] + column, row_bytes);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(6, rows[1] + column, row_bytes);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(6, rows[2] + column, row_bytes);
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(7, right, 2 * TILE_BYTES);
            _tile_dpbf16ps(5, 6, 7);
            _tile_loadd(6, rows[1] + column, row_bytes);
            _tile_dpbf16ps(3, 6, 7);
            _tile_loadd(6, rows[0] + column, row_bytes);
            _tile_dpbf16ps(1, 6, 7);
            continue;
        }
        _tile_loadd(7, left, 2 * TILE_BYTES);
        _tile_loadd(4, rows[0] + column, row_bytes);
        _tile_dpbf16ps(0, 4, 7);
        if (COUNT == 2) {
            _tile_loadd(5, rows[1] + column, row_bytes);
            _tile_dpbf16ps(2, 5, 7);
        }
        _tile_loadd(7, right, 2 * TILE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (COUNT == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 2 * TILE_BYTES);
    _tile_stored(1, sums + LANES, 2 * TILE_BYTES);
    if (COUNT > 1) {
        _tile_stored(2, sums + TILE_ROWS * PANEL_WIDTH, 2 * TILE_BYTES);
        _tile_stored(3, sums + TILE_ROWS * PANEL_WIDTH + LANES, 2 * TILE_BYTES);
    }
    if (COUNT == 3) {
        _tile_stored(4, sums + 2 * TILE_ROWS * PANEL_WIDTH, 2 * TILE_BYTES);
        _tile_stored(5, sums + 2 * TILE_ROWS * PANEL_WIDTH + LANES, 2 * TILE_BYTES);
    }
    __asm__ volatile("" ::: "memory");  // tile stores write memory unknown to the compiler
}

// The partition of rows into tiles of equal size, and of tiles into as few blocks as possible. The
// last tile ends with the last row and may overlap the tile before it.
struct TiledRows {
    int64_t first, count;   // first row and number of rows
    int64_t tiles, blocks;  // number of tiles and of blocks
    int64_t rows_per_tile;

    TiledRows(int64_t first, int64_t count) : first(first), count(count) {
        tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
        blocks = (tiles + MAX_ROW_TILES - 1) / MAX_ROW_TILES;
        rows_per_tile = (count + tiles - 1) / tiles;
    }

    int64_t first_row(int64_t tile) const {
        return first + min_int(tile * rows_per_tile, count - rows_per_tile);
    }
    int64_t first_tile(int64_t block) const { return tiles * block / blocks; }
    int64_t tiles_of(int64_t block) const { return first_tile(block + 1) - first_tile(block); }
};

// Multiplies one block of rows with a panel; see multiply_tiles.
template <class Panel>
INLINE void multiply_block(const BFloat16 *x, int64_t stride, const TiledRows &rows, int64_t block,
                           int64_t steps, Panel &&panel, float *sums) {
    const BFloat16 *from[MAX_ROW_TILES];
    const int64_t tiles = rows.tiles_of(block);
    for (int64_t tile = 0; tile < tiles; ++tile)
        from[tile] = x + rows.first_row(rows.first_tile(block) + tile) * stride;
    if (tiles == 1)
        multiply_tiles<1>(from, stride, steps, panel, sums);
    else if (tiles == 2)
        multiply_tiles<2>(from, stride, steps, panel, sums);
    else
        multiply_tiles<3>(from, stride, steps, panel, sums);
}

// Calls the epilogue for the rows of a block, starting with the given row. Returns the first row of
// the next block. The epilogue receives a row that is in two tiles once.
template <class Epilogue>
INLINE int64_t apply_epilogue(const TiledRows &rows, int64_t block, const float *sums, int64_t row,
                              const Epilogue &epilogue) {
    for (int64_t tile = 0; tile < rows.tiles_of(block); ++tile) {
        const int64_t first = rows.first_row(rows.first_tile(block) + tile);
        const float *tile_sums = sums + tile * TILE_ROWS * PANEL_WIDTH;
        for (; row < first + rows.rows_per_tile; ++row) {
            const float *sum = tile_sums + (row - first) * PANEL_WIDTH;
            epilogue(row, read(sum), read(sum + LANES));
        }
    }
    return row;
}

// The same as multiply_panel of matrix.h. A TileConfig for rows.rows_per_tile must be active.
template <class Epilogue>
void multiply_panel(const BFloat16 *x, int64_t stride, const TiledRows &rows, int64_t depth,
                    const char *panel, PrefetchRange prefetch, const Epilogue &epilogue) {
    alignas(64) float sums[MAX_ROW_TILES * TILE_ROWS * PANEL_WIDTH];
    const int64_t steps = depth / TILE_DEPTH;
    const int64_t lines = prefetch.from ? prefetch.bytes / CACHE_LINE / steps / rows.blocks : 0;
    int64_t next_row = rows.first;
    for (int64_t b = 0; b < rows.blocks; ++b) {
        const char *next = prefetch.from + b * lines * CACHE_LINE * steps;
        multiply_block(x, stride, rows, b, steps, PanelSteps{panel, next, lines}, sums);
        next_row = apply_epilogue(rows, b, sums, next_row, epilogue);
    }
}

// Number of rows that stay in the cache during a product. For prompts, more rows mean fewer passes
// over the panels.
INLINE int64_t cached_rows(int64_t depth) {
    constexpr int64_t BYTES = 1 << 20, BLOCK = MAX_ROW_TILES * TILE_ROWS;
    return std::max<int64_t>(CACHED_ROWS,
                             BYTES / (depth * (int64_t)sizeof(BFloat16)) / BLOCK * BLOCK);
}

// The same as multiply of matrix.h. All rows of x must be complete before the call.
template <class Epilogue>
void multiply(TiledWeight, const BFloat16 *x, int64_t stride, int64_t rows, int64_t depth,
              const void *weight, int64_t first_panel, int64_t end_panel, char * /* expanded */,
              const Epilogue &epilogue) {
    const int64_t size = depth / TILE_DEPTH * TiledWeight::BYTES, max_rows = cached_rows(depth);
    for (int64_t start = 0; start < rows; start += max_rows) {
        const TiledRows tiled(start, min_int(max_rows, rows - start));
        const TileConfig config((int)tiled.rows_per_tile);
        for (int64_t p = first_panel; p < end_panel; ++p) {
            const char *panel = (const char *)weight + p * size;
            const PrefetchRange prefetch = {p + 1 < end_panel ? panel + size : nullptr, size};
            multiply_panel(x, stride, tiled, depth, panel, prefetch,
                           [&](int64_t row, Floats left, Floats right) {
                               epilogue(row, p, left, right);
                           });
        }
    }
}

}  // namespace

#endif
