/* bcryptprimitives.dll for Wine 8, which has none; Rust's standard library takes its random numbers from there. Windows
 * has its own, so this is for the tests only. */
#include <windows.h>

#include <ntsecapi.h>

__declspec(dllexport) BOOL WINAPI ProcessPrng(BYTE *data, SIZE_T length) { return RtlGenRandom(data, (ULONG)length); }
