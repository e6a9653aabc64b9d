/* The arguments of a program in UTF-8, as the library takes them. Windows gives them to `main` in the code page of the
 * user's language, which has not every character. Link it with -Wl,--wrap=main; the program stays as it is. */
#include <windows.h>

#include <shellapi.h>
#include <stdlib.h>

int __real_main(int argc, char **argv);

int __wrap_main(int argc, char **argv) {
    wchar_t **wide = CommandLineToArgvW(GetCommandLineW(), &argc);
    argv = wide ? calloc((size_t)argc + 1, sizeof *argv) : NULL;
    if (!argv) return 1;
    for (int i = 0; i < argc; i++) {
        int bytes = WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, NULL, 0, NULL, NULL);
        argv[i] = malloc((size_t)bytes);
        if (!argv[i]) return 1;
        WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, argv[i], bytes, NULL, NULL);
    }
    LocalFree(wide);
    return __real_main(argc, argv);
}
