// Products on the processor's matrix unit (Intel AMX), of weights laid out as in matrix.h.
//
// A tile of the weight is sixteen columns and thirty-two numbers of each, as they lie in a panel of
// pairs: a panel is two tiles side by side. Up to three tiles of rows are multiplied with both while
// these are at hand, so that six tiles of sums are kept. A row's sum is made in the same order
// however many rows there are, and in whichever tile it is.

#pragma once

#include "matrix.h"

#if defined(__AMX_BF16__)

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace {

constexpr int TILE_ROWS = 16, TILE_DEPTH = 32;
constexpr int TILE_BYTES = 64;  // of a row of a tile, whatever it holds
constexpr int MOST_TILES = 3;         // of rows, that are multiplied together
// Tiles have plain numbers, which become names of registers: 0 and 1 are the sums of the first rows
// with left and right, 2 and 3 those of the second, 4 and 5 those of the third or else the rows. 6 is
// rows, too, and 7 first left and then right.
constexpr int NUM_TILES = 8, WEIGHT = 7;

// The operating system lets a process use the unit when it asks.
inline bool may_use_tiles() {
    constexpr long ASK_FOR_FEATURE = 0x1023, TILE_DATA = 18;
    static const bool may = syscall(SYS_arch_prctl, ASK_FOR_FEATURE, TILE_DATA) == 0;
    return may;
}

struct TiledWeight : PairedWeight {
    static constexpr int DEPTH = TILE_DEPTH;
    static constexpr int BYTES = TILE_DEPTH / PairedWeight::DEPTH * PairedWeight::BYTES;
};

// While it lives, this thread's tiles of rows and of sums have so many rows.
struct TileShapes {
    explicit TileShapes(int rows) {
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } shapes = {};
        shapes.palette = 1;
        for (int tile = 0; tile < NUM_TILES; ++tile) {
            shapes.bytes[tile] = TILE_BYTES;
            shapes.rows[tile] = tile < WEIGHT ? rows : TILE_ROWS;
        }
        __asm__ volatile("" ::: "memory");
        _tile_loadconfig(&shapes);
    }

    ~TileShapes() { _tile_release(); }
};

// The steps of a panel, each of which asks for some lines of what follows.
struct PanelSteps {
    const char *panel, *next;
    int64_t next_lines;

    INLINE_MEMBER const char *operator()(int64_t step) {
        for (int64_t line = 0; line < next_lines; ++line)
            __builtin_prefetch(next + (step * next_lines + line) * CACHE_LINE, 0, 2);
        return panel + step * TiledWeight::BYTES;
    }
};

// Some tiles of rows with a panel; rows[i] is where the i-th begins. panel(step) tells where a step
// of it lies, and is asked in their order.
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
    __asm__ volatile("" ::: "memory");  // the compiler does not know what is read
    for (int64_t step = 0; step < steps; ++step) {
        const char *left = panel(step), *right = left + TILE_BYTES;
        const int64_t place = step * TILE_DEPTH;
        if (COUNT == 3) {
            _tile_loadd(7, left, 2 * TILE_BYTES);
            _tile_loadd(6, rows[0] + place, row_bytes);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(6, rows[1] + place, row_bytes);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(6, rows[2] + place, row_bytes);
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(7, right, 2 * TILE_BYTES);
            _tile_dpbf16ps(5, 6, 7);
            _tile_loadd(6, rows[1] + place, row_bytes);
            _tile_dpbf16ps(3, 6, 7);
            _tile_loadd(6, rows[0] + place, row_bytes);
            _tile_dpbf16ps(1, 6, 7);
            continue;
        }
        _tile_loadd(7, left, 2 * TILE_BYTES);
        _tile_loadd(4, rows[0] + place, row_bytes);
        _tile_dpbf16ps(0, 4, 7);
        if (COUNT == 2) {
            _tile_loadd(5, rows[1] + place, row_bytes);
            _tile_dpbf16ps(2, 5, 7);
        }
        _tile_loadd(7, right, 2 * TILE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (COUNT == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 2 * TILE_BYTES);
    _tile_stored(1, sums + LANES, 2 * TILE_BYTES);
    if (COUNT > 1) {
        _tile_stored(2, sums + TILE_ROWS * PANEL, 2 * TILE_BYTES);
        _tile_stored(3, sums + TILE_ROWS * PANEL + LANES, 2 * TILE_BYTES);
    }
    if (COUNT == 3) {
        _tile_stored(4, sums + 2 * TILE_ROWS * PANEL, 2 * TILE_BYTES);
        _tile_stored(5, sums + 2 * TILE_ROWS * PANEL + LANES, 2 * TILE_BYTES);
    }
    __asm__ volatile("" ::: "memory");  // the compiler does not know what is written
}

// How rows are cut into tiles, all of which are alike, and tiles into as few blocks as can be: the
// last tile ends with the last row, and has some rows again.
struct TiledRows {
    int64_t first, count, tiles, blocks, in_tile;

    TiledRows(int64_t first, int64_t count) : first(first), count(count) {
        tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
        blocks = (tiles + MOST_TILES - 1) / MOST_TILES;
        in_tile = (count + tiles - 1) / tiles;
    }

    int64_t row_of(int64_t tile) const { return first + least(tile * in_tile, count - in_tile); }
    int64_t first_tile(int64_t block) const { return tiles * block / blocks; }
    int64_t tiles_of(int64_t block) const { return first_tile(block + 1) - first_tile(block); }
};

// A block of rows with a panel: see multiply_tiles.
template <class Panel>
INLINE void multiply_block(const BFloat16 *x, int64_t stride, const TiledRows &rows, int64_t block,
                           int64_t steps, Panel &&panel, float *sums) {
    const BFloat16 *from[MOST_TILES];
    const int64_t tiles = rows.tiles_of(block);
    for (int64_t tile = 0; tile < tiles; ++tile)
        from[tile] = x + rows.row_of(rows.first_tile(block) + tile) * stride;
    if (tiles == 1)
        multiply_tiles<1>(from, stride, steps, panel, sums);
    else if (tiles == 2)
        multiply_tiles<2>(from, stride, steps, panel, sums);
    else
        multiply_tiles<3>(from, stride, steps, panel, sums);
}

// Hand the sums of a block out, from a row on; the row to go on with.
template <class Use>
INLINE int64_t hand_out(const TiledRows &rows, int64_t block, const float *sums, int64_t row,
                        const Use &use) {
    for (int64_t tile = 0; tile < rows.tiles_of(block); ++tile) {
        const int64_t first = rows.row_of(rows.first_tile(block) + tile);
        const float *of_tile = sums + tile * TILE_ROWS * PANEL;
        for (; row < first + rows.in_tile; ++row) {
            const float *sum = of_tile + (row - first) * PANEL;
            use(row, read(sum), read(sum + LANES));
        }
    }
    return row;
}

// As multiply_panel of matrix.h; TileShapes are those of the rows.
template <class Use>
void multiply_panel(const BFloat16 *x, int64_t stride, const TiledRows &rows, int64_t depth,
                    const char *panel, Ahead ahead, const Use &use) {
    alignas(64) float sums[MOST_TILES * TILE_ROWS * PANEL];
    const int64_t steps = depth / TILE_DEPTH;
    const int64_t lines = ahead.from ? ahead.bytes / CACHE_LINE / steps / rows.blocks : 0;
    int64_t done = rows.first;
    for (int64_t b = 0; b < rows.blocks; ++b) {
        const char *next = ahead.from + b * lines * CACHE_LINE * steps;
        multiply_block(x, stride, rows, b, steps, PanelSteps{panel, next, lines}, sums);
        done = hand_out(rows, b, sums, done, use);
    }
}

// Rows that stay in the cache while panels pass: of a prompt, the more the less often these do.
INLINE int64_t rows_at_once(int64_t depth) {
    constexpr int64_t BYTES = 1 << 20, BLOCK = MOST_TILES * TILE_ROWS;
    return std::max<int64_t>(ROWS_AT_ONCE,
                             BYTES / (depth * (int64_t)sizeof(BFloat16)) / BLOCK * BLOCK);
}

// As multiply of matrix.h; all rows of x were written before, by whichever thread.
template <class Use>
void multiply(TiledWeight, const BFloat16 *x, int64_t stride, int64_t rows, int64_t depth,
              const void *weight, int64_t first_panel, int64_t end_panel, char * /* memory */,
              const Use &use) {
    const int64_t size = depth / TILE_DEPTH * TiledWeight::BYTES, at_once = rows_at_once(depth);
    for (int64_t start = 0; start < rows; start += at_once) {
        const TiledRows tiled(start, least(at_once, rows - start));
        const TileShapes shapes((int)tiled.in_tile);
        for (int64_t p = first_panel; p < end_panel; ++p) {
            const char *panel = (const char *)weight + p * size;
            const Ahead ahead = {p + 1 < end_panel ? panel + size : nullptr, size};
            multiply_panel(x, stride, tiled, depth, panel, ahead,
                           [&](int64_t row, Floats left, Floats right) {
                               use(row, p, left, right);
                           });
        }
    }
}

}  // namespace

#endif
