//! Finds the fastest plan within a limit. Chunks and slices shrink first, then caches and weights are offloaded; both
//! are exact. Tiles come last.
//!
//! Owns the order of preference. Estimates come from `cost`, memory from rehearsed plans.

mod candidates;
mod select;
mod tiles;

use std::sync::Arc;

use parking_lot::Mutex;

use self::candidates::{all_offloaded, resident_policies};
use self::select::{Search, Smallest};
use self::tiles::smaller_tiles;
use super::cost::Target;
use super::plan::Plan;
use super::policy::SchedulePolicy;
use super::request::{PlanError, Request};
use super::tiles::TileSize;

/// The fastest plan that fits. A fitting plan with everything resident is never rejected; tiles are used only if
/// nothing exact fits, or if the host asks for them.
pub fn search(request: &Request, target: &Target) -> Result<Plan, PlanError> {
    let (smallest, policies) = (Mutex::new(Smallest::default()), resident_policies(request, &target.profile));
    let search = Search {
        request,
        limit: request.limit,
        grid: request.tiles.and_then(|size| request.grid(size)),
        offloaded_weights: Arc::default(),
        target: *target,
        smallest: &smallest,
    };
    let found = search.first_packed(&policies[..1]);
    let found = found.or_else(|| search.fastest_anywhere(&policies));
    let found = found.or_else(|| search.anywhere(Search::offloaded_still));
    let found = found.or_else(|| if request.allow_tiles { largest_tiles(&policies, &search) } else { None });
    let found = found.map_or_else(|| smallest_plan(request, smallest.into_inner(), target), Ok);
    if target.is_cancelled() { Err(PlanError::Cancelled) } else { found }
}

/// The largest tiles that fit, with the fastest policy.
fn largest_tiles(policies: &[Arc<SchedulePolicy>], whole: &Search) -> Option<Plan> {
    let last = policies.last().expect("there is always one");
    let mut least = vec![Arc::clone(last)];
    if whole.target.profile.offloads {
        least.push(Arc::new(all_offloaded(whole.request, last, &whole.target)));
    }
    let search_of = |size: TileSize| Search { grid: whole.request.grid(size), ..whole.clone() };
    let smallest = |search: &Search| search.anywhere(|search| search.first_packed(&least));
    let of_size = |size: TileSize| {
        let search = search_of(size);
        let fits = smallest(&search)?;
        if whole.target.profile.offloads { search.fastest_anywhere(policies).or(Some(fits)) } else { Some(fits) }
    };
    let mut sizes = smaller_tiles(whole.request);
    if whole.effort() > 1 {
        // Smaller tiles take less, but for rounding, so the largest that fit are found by halving.
        let too_large = |size: &TileSize| !whole.target.is_cancelled() && smallest(&search_of(*size)).is_none();
        let first = sizes.partition_point(too_large);
        sizes.drain(..first.min(sizes.len()));
        sizes.truncate(2);
    }
    sizes.into_iter().take_while(|_| !whole.target.is_cancelled()).find_map(of_size)
}

/// The smallest plan rehearsed so far, if it fits once packed.
fn smallest_plan(request: &Request, met: Smallest, target: &Target) -> Result<Plan, PlanError> {
    let [exact, tiled] = [met.exact, met.tiled].map(|found| found.map(|found| found.packed(target)));
    let smallest_exact = exact.as_ref().map(Plan::device_bytes);
    let smallest = [&exact, &tiled].into_iter().flatten().map(Plan::device_bytes).min();
    let fits = |found: &Plan| found.fits(request.limit, request.host_limit);
    let fitting = [exact, tiled].into_iter().flatten().find(fits);
    fitting.ok_or(PlanError::TooLarge { smallest, smallest_exact })
}
