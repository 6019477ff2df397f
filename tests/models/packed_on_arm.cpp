// Packs blocks and multiplies rows with them, for a processor that is emulated.
//
// Reads from standard input, for each weight: seven int64 (type, columns, inputs, bytes of a row of
// blocks, bytes of the packed weight, rows, bytes of the grid), the blocks, the packed weight, the
// rows in float32, and the grid.
// Writes for each weight: an int64, which is 1 if packing gives the same bytes, and the products.

#include "library.cpp"

#include <cstdio>
#include <vector>

int main() {
    const Threads one = {nullptr, nullptr, 1};
    int64_t sizes[7];
    while (fread(sizes, sizeof sizes, 1, stdin)) {
        const int64_t type = sizes[0], columns = sizes[1], depth = sizes[2], row_bytes = sizes[3];
        const int64_t count = sizes[5];
        std::vector<uint8_t> blocks(columns * row_bytes), packed(sizes[4]), grid(sizes[6]);
        std::vector<float> rows(count * depth), products(count * columns);
        if (!fread(blocks.data(), blocks.size(), 1, stdin) ||
            !fread(packed.data(), packed.size(), 1, stdin) ||
            !fread(rows.data(), rows.size() * sizeof(float), 1, stdin) ||
            (!grid.empty() && !fread(grid.data(), grid.size(), 1, stdin)))
            return 1;
        const PackedSection &section = ((const PackedHeader *)packed.data())->sections[0];
        std::vector<uint8_t> own(packed.begin(), packed.begin() + section.offset);
        own.resize(packed.size());
        const BlockKind kind = {section.kinds[0], type, grid.data()};
        const PackCall call = {blocks.data(), nullptr, nullptr, &kind,
                               (char *)own.data() + section.offset, row_bytes, columns, depth,
                               draftwise_tile_bytes(&kind.packed, depth)};
        draftwise_pack_blocks(&call, &one);
        const int64_t is_equal = own == packed;
        std::vector<char> memory(draftwise_packed_memory(count, depth, 1) + 64);
        char *aligned = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
        draftwise_multiply_packed(rows.data(), count, depth, packed.data(), columns,
                                  products.data(), aligned, &one);
        fwrite(&is_equal, sizeof is_equal, 1, stdout);
        fwrite(products.data(), products.size() * sizeof(float), 1, stdout);
    }
}
