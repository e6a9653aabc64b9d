//! Tile sizes that a limit may force. Knows the request; does not plan.

use crate::plan::request::{MAX_WORK_ITEMS, Request};
use crate::plan::tiles::{Spacing, TileSize};

/// The search for tiles ends here: a job of more tiles would take too long. Set by hand.
const MAX_TILES: u64 = 1 << 9;
/// Pixels of a tile's side, at least: eight latent pixels. Smaller tiles are mostly overlap.
const MIN_SIDE: u64 = 64;

/// Evenly sized tiles, from the largest to the smallest. None is larger than the host asked for.
pub fn smaller_tiles(request: &Request) -> Vec<TileSize> {
    let scale = request.network.geometry.space;
    let (rows, columns) = request.latent();
    let least = MIN_SIDE.div_ceil(scale).max(1);
    let overlap = request.overlap / scale;
    // The length of n spans of an axis that share `overlap`.
    let side = |length: u64, n: u64| (length + (n - 1) * overlap).div_ceil(n).max(least).min(length);
    let mut sizes: Vec<TileSize> = Vec::new();
    let (mut down, mut across) = (1, 1);
    loop {
        let (height, width) = (side(rows, down) * scale, side(columns, across) * scale);
        let size = TileSize { height, width, overlap: request.overlap, spacing: Spacing::Even };
        let allowed = request.tiles.is_none_or(|most| size.height <= most.height && size.width <= most.width);
        // Tiles that are hardly smaller hardly take less.
        let smaller = sizes.last().is_none_or(|last| size.height * size.width * 10 <= last.height * last.width * 9);
        if allowed && smaller && (down, across) != (1, 1) {
            sizes.push(size);
        }
        if down * across > MAX_TILES || down * across * request.batch > MAX_WORK_ITEMS {
            return sizes;
        }
        // The longer side is cut next. Rounding may make the next cut no finer; a later one is.
        let finer = |length: u64, n: u64| {
            let now = side(length, n);
            (n + 1..=length).take_while(|_| now > least.max(overlap + 1)).find(|m| side(length, *m) < now)
        };
        match (finer(rows, down), finer(columns, across)) {
            (None, None) => return sizes,
            (Some(n), None) => down = n,
            (None, Some(n)) => across = n,
            (Some(n), Some(_)) if height > width => down = n,
            (Some(_), Some(n)) => across = n,
        }
    }
}
