#include "progress.h"

#include <cstdio>

#include "interrupt.h"
#include "platform.h"

namespace host {

Progress::Progress(std::string name)
    : name_(std::move(name)), terminal_(stderr_is_a_terminal()), start_(std::chrono::steady_clock::now()) {}

int32_t Progress::tell(void *user, uint64_t done, uint64_t total, const char *stage) noexcept {
    int percent = total ? static_cast<int>(100.0 * double(done) / double(total)) : 0;
    static_cast<Progress *>(user)->show(percent, stage);
    return interrupted() ? 1 : 0;
}

void Progress::show(int percent, const char *stage) {
    int step = terminal_ ? percent : percent / 10;
    if (step == shown_) return;
    shown_ = step;
    std::fprintf(stderr, terminal_ ? "\r%s: %s %3d%% " : "%s: %s %d%%\n", name_.c_str(), stage, percent);
    std::fflush(stderr);
}

void Progress::done() {
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start_;
    std::fprintf(stderr, "%s%s: done in %.2f s\n", terminal_ ? "\r" : "", name_.c_str(), seconds.count());
}

void Progress::stopped() {
    if (terminal_) std::fputc('\n', stderr);
}

} // namespace host
