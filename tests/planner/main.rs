//! Plans: what they choose, and that bits and bytes are as planned. What measures the time or the threads of its process is
//! a program of its own: `planner_cancel`, `planner_grid`, `planner_threads`.

#[path = "../common/mod.rs"]
mod common;

mod absent;
mod bytes;
mod corpus;
mod extremes;
mod identity;
mod limits;
mod ranges;
mod rates;
mod schedules;
mod timeline;
