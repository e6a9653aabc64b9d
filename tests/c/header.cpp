// The C++ wrapper on its own: it needs no other include before it, and may be included twice.
#include "video_vae.hpp"
#include "video_vae.hpp"

static_assert(!std::is_copy_constructible_v<video_vae::Vae> && std::is_nothrow_move_constructible_v<video_vae::Vae>);
static_assert(!std::is_copy_constructible_v<video_vae::Stream> && std::is_nothrow_move_assignable_v<video_vae::Stream>);
