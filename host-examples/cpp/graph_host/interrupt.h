// Ctrl-C: cancels what the library is doing, from a thread that has nothing else to do.
#pragma once

#include <stdexcept>

#include "library.h"

namespace host {

// Call it before the library makes threads of its own. A second Ctrl-C ends the process at once.
void watch_for_interrupts(const Library &library);

// The handle that Ctrl-C cancels; null for none.
void interrupts_cancel(vvae *v);

bool interrupted();

struct Interrupted : std::runtime_error {
    Interrupted() : std::runtime_error("interrupted") {}
};

// Throws as soon as the user wants to stop.
void check_interrupt();

// 128 + SIGINT, as shells expect it.
constexpr int INTERRUPTED_EXIT_CODE = 130;

} // namespace host
