// The structs that a host passes to a kernel of emu.h. modules.rs has the same ones in Rust.
#pragma once
#include <stdint.h>

namespace emu {

struct Arg { uint32_t kind; uint64_t bits; };
struct Request {
    uint32_t grid[3], block, shared_bytes, n_args;
    const Arg* args;
    uint64_t seed, fault_address;
    char message[512];
};
static_assert(sizeof(Arg) == 16 && sizeof(Request) == 560, "modules.rs asserts the same sizes");

}  // namespace emu
