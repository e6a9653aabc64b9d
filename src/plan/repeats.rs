//! Which work items a schedule has: all of them, or for a rehearsal one for each kind.
//!
//! Owns the order of work items, and how many are like the one that is rehearsed. Those take and drop the same slots,
//! so [groups](crate::plan::arena::Arena::begin_group) count them exactly.

use super::spec::{ItemOrder, ScheduleSpec};
use super::tiles::first_inner_last;

/// What a schedule is for, and which work items it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Every work item.
    Run,
    /// Of work items that are alike, one.
    Picture,
    /// The same. Nobody runs the operations, so frames of several terms have none.
    Rehearsal,
}

/// A work item of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ItemPlace {
    /// Its number among all work items of the job.
    pub item: usize,
    pub batch: u64,
    /// The number of its clip among those that are scheduled.
    pub clip: usize,
    /// Work items of the job that it stands for, and clips like its own.
    pub items: u64,
    pub clips: u64,
    /// Groups that begin with it: itself, its row of tiles, its clip.
    pub begins: usize,
    /// How often the groups are repeated that end with it.
    pub ends: [Option<u64>; 3],
}

/// Every work item, or one of each kind. The first tile of a clip takes the frames that tiles are blended into and the
/// last one finishes them; the last row and column may be narrower; the last clip of a stream completes the output.
pub fn work_items(of: Purpose, spec: &ScheduleSpec) -> Vec<ItemPlace> {
    let is_run = of == Purpose::Run;
    let (rows, columns) = match spec.grid.as_deref() {
        None => (1, 1),
        Some(grid) if grid.is_uniform() => (1, grid.tiles()),
        Some(grid) => grid.sides(),
    };
    let each = |count: usize| -> Vec<(usize, usize)> { (0..count).map(|i| (i, 1)).collect() };
    let kinds = |count: usize| if is_run { each(count) } else { first_inner_last(count) };
    let clips = match spec.batch as usize {
        clips if is_run || clips == 1 => each(clips),
        clips if spec.end.is_some() && spec.order == ItemOrder::SliceBySlice => vec![(0, clips)],
        clips => vec![(0, clips - 1), (clips - 1, 1)],
    };
    let mut places = Vec::new();
    for (clip, (batch, like_clip)) in clips.into_iter().enumerate() {
        for (row, like_row) in kinds(rows) {
            for (column, like_column) in kinds(columns) {
                let [first_column, last_column] = [column == 0, column + 1 == columns];
                let [first_tile, last_tile] = [first_column && row == 0, last_column && row + 1 == rows];
                places.push(ItemPlace {
                    item: (batch * rows + row) * columns + column,
                    batch: batch as u64,
                    clip,
                    items: (like_column * like_row * like_clip) as u64,
                    clips: like_clip as u64,
                    begins: 1 + usize::from(first_column) + usize::from(first_tile),
                    ends: [(true, like_column), (last_column, like_row), (last_tile, like_clip)]
                        .map(|(ends, like)| ends.then_some(like as u64 - 1)),
                });
            }
        }
    }
    places
}
