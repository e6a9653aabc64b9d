#include "interrupt.h"

#include <atomic>
#include <cstdlib>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <csignal>
#include <thread>
#endif

namespace host {

namespace {

const Library *watched_library = nullptr;
std::atomic<vvae *> watched_handle{nullptr};
std::atomic<bool> requested{false};

// On a thread of its own on every system, so it may call what a signal handler must not.
void interrupt() {
    if (requested.exchange(true)) std::_Exit(INTERRUPTED_EXIT_CODE);
    // A handle that is being freed meanwhile is an error status, no more: handles are never used twice.
    if (vvae *v = watched_handle.load()) watched_library->vvae_cancel(v);
}

#ifdef _WIN32
BOOL WINAPI on_console_event(DWORD) {
    interrupt();
    return TRUE;
}
#endif

} // namespace

void watch_for_interrupts(const Library &library) {
    watched_library = &library;
#ifdef _WIN32
    SetConsoleCtrlHandler(on_console_event, TRUE);
#else
    // Blocked here and so in every thread that comes later, the library's included: the signals are left to sigwait.
    // It does not get those that are ignored, and scripts start what they put in the background that way.
    sigset_t signals;
    sigemptyset(&signals);
    for (int number : {SIGINT, SIGTERM}) {
        sigaddset(&signals, number);
        std::signal(number, SIG_DFL);
    }
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    std::thread([signals] {
        for (int number = 0; sigwait(&signals, &number) == 0;) interrupt();
    }).detach();
#endif
}

void interrupts_cancel(vvae *v) { watched_handle = v; }

bool interrupted() { return requested; }

void check_interrupt() {
    if (requested) throw Interrupted();
}

} // namespace host
