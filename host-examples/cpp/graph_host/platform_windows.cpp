#include "platform.h"

#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>

#include <shellapi.h>
#include <stdexcept>

namespace host {

const char *const LIBRARY_FILE_NAME = "video_vae.dll";

void *open_shared(const std::string &path) {
    // Absolute, as only then its own folder is searched for what it needs in turn.
    auto absolute = std::filesystem::absolute(std::filesystem::u8path(path));
    HMODULE opened = LoadLibraryExW(absolute.c_str(), nullptr, LOAD_WITH_ALTERED_SEARCH_PATH);
    if (!opened) {
        throw std::runtime_error("cannot open the library " + path + ": error " + std::to_string(GetLastError()));
    }
    return opened;
}

void *find_symbol(void *opened, const char *name) {
    return reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(opened), name));
}

std::filesystem::path executable_folder() {
    std::wstring path(32768, L'\0');
    path.resize(GetModuleFileNameW(nullptr, path.data(), static_cast<DWORD>(path.size())));
    return std::filesystem::path(path).parent_path();
}

std::vector<std::string> arguments(int, char **) {
    SetConsoleOutputCP(CP_UTF8);
    int count = 0;
    wchar_t **wide = CommandLineToArgvW(GetCommandLineW(), &count);
    std::vector<std::string> words;
    for (int i = 0; i < count; i++) words.push_back(std::filesystem::path(wide[i]).u8string());
    LocalFree(wide);
    return words;
}

bool stderr_is_a_terminal() { return GetFileType(GetStdHandle(STD_ERROR_HANDLE)) == FILE_TYPE_CHAR; }

} // namespace host
