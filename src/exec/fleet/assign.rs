//! Who computes what: divides a job by the members' speeds, with a plan for every part. Must not run anything.

use std::sync::atomic::AtomicBool;

use super::divide::{self, Part};
use super::job::FleetJob;
use super::member::{self, Member};
use crate::error::{Error, Result};
use crate::exec::PlanKind;
use crate::ir::Shape;
use crate::model::FrameRange;
use crate::report::{DeviceDivision, DeviceReport, PlanReport};

/// Divisions that are tried while estimates still change.
const TRIES: usize = 3;
/// A division is kept unless another one takes this share of its time.
const WORTH_ANOTHER: f64 = 0.97;

/// The parts of one member, with their plans.
pub struct Assignment {
    pub member: usize,
    pub parts: Vec<(Part, PlanReport)>,
}

/// Divides a part of a job among the members that can do it. Members that cannot plan their share are left out.
pub fn assign(members: &mut [Member], job: &FleetJob, part: &Part, cancel: &AtomicBool) -> Result<Vec<Assignment>> {
    let cut = |frame: u64| job.cut_cost(frame);
    let direction = job.direction();
    let mut tries = 0;
    loop {
        let speeds: Vec<f64> = members.iter().map(|member| member.speed(direction)).collect();
        if speeds.iter().all(|speed| *speed == 0.0) {
            return Err(no_member(members));
        }
        let step = job.cut_step(members.len());
        let division = divide::divide(part, &speeds, &cut, step);
        let planned = plan(members, job, &division, cancel);
        let mut all = Vec::new();
        let mut left_out = false;
        for (index, planned) in planned.into_iter().enumerate() {
            match planned {
                Ok(parts) => all.push(Assignment { member: index, parts }),
                Err(error) if member::is_of_device(&error) => {
                    members[index].leave_out(error);
                    left_out = true;
                }
                Err(error) => return Err(error),
            }
        }
        if left_out || leave_out_tiled(members, &all) {
            continue;
        }
        tries += 1;
        let found = found_speeds(members, job, &all);
        let took = divide::seconds(&division, &found, &cut);
        for (member, speed) in members.iter_mut().zip(&found) {
            member.set_speed(direction, *speed);
        }
        let better = divide::seconds(&divide::divide(part, &found, &cut, step), &found, &cut);
        if tries == TRIES || better >= WORTH_ANOTHER * took {
            return Ok(all);
        }
    }
}

/// Leaves out members that could only work in tiles, if others can do without: tiles are not exact.
fn leave_out_tiled(members: &mut [Member], all: &[Assignment]) -> bool {
    let is_tiled = |a: &Assignment| a.parts.iter().any(|(_, plan)| plan.is_tiled());
    let busy = || all.iter().filter(|assignment| !assignment.parts.is_empty());
    let tiled: Vec<usize> = busy().filter(|a| is_tiled(a)).map(|a| a.member).collect();
    if tiled.len() == busy().count() {
        return false;
    }
    for member in &tiled {
        members[*member].leave_out(Error::Memory(
            "memory_limit: its part would fit in tiles only, which is not exact; raise its limit".into(),
        ));
    }
    !tiled.is_empty()
}

fn no_member(members: &mut [Member]) -> Error {
    let failed = members.iter().find_map(Member::failure);
    failed.unwrap_or_else(|| Error::Internal("no device is left, but none failed".into()))
}

/// The plans of all parts. Parts that are alike, of members of one kind, are planned once.
fn plan(
    members: &mut [Member],
    job: &FleetJob,
    division: &[Vec<Part>],
    cancel: &AtomicBool,
) -> Vec<Result<Vec<(Part, PlanReport)>>> {
    let kinds: Vec<PlanKind> = members.iter().map(|member| member.session.plan_kind()).collect();
    // What each member plans; and of each part, who plans it and which of his plans it has.
    let mut own: Vec<Vec<Part>> = vec![Vec::new(); members.len()];
    let mut planner = |index: usize, part: &Part| {
        let like = |member: &usize| kinds[*member] == kinds[index];
        let found = (0..=index).filter(like).find_map(|member| {
            own[member].iter().position(|planned| job.is_alike(planned, part)).map(|at| (member, at))
        });
        found.unwrap_or_else(|| {
            own[index].push(part.clone());
            (index, own[index].len() - 1)
        })
    };
    let planners: Vec<Vec<(usize, usize)>> = division
        .iter()
        .enumerate()
        .map(|(index, parts)| parts.iter().map(|part| planner(index, part)).collect())
        .collect();
    let planned = plan_own(members, job, &own, cancel);
    let report = |part: &Part, (member, at): &(usize, usize)| {
        let mut report = planned[*member].as_ref().map_err(Error::clone)?[*at].clone()?;
        if let Some(range) = job.range(part) {
            report.range = FrameRange { first: range.first, end: range.count.map(|count| range.first + count) };
        }
        Ok((part.clone(), report))
    };
    let reports = division.iter().zip(&planners);
    reports.map(|(parts, planners)| parts.iter().zip(planners).map(|(part, by)| report(part, by)).collect()).collect()
}

/// The plans that each member makes itself, on a thread of its own.
fn plan_own(
    members: &mut [Member],
    job: &FleetJob,
    own: &[Vec<Part>],
    cancel: &AtomicBool,
) -> Vec<Result<Vec<Result<PlanReport>>>> {
    let busy = members.iter_mut().zip(own).filter(|(_, parts)| !parts.is_empty()).collect();
    let plan = |(member, parts): (&mut Member, &Vec<Part>)| {
        Ok(parts.iter().map(|part| member.session.plan(&job.shape(part), cancel)).collect())
    };
    let mut planned = member::at_once(busy, plan, || ()).into_iter();
    let of_member = |parts: &Vec<Part>| if parts.is_empty() { Some(Ok(Vec::new())) } else { planned.next() };
    own.iter().map_while(of_member).collect()
}

/// Frames a second of each member: those of its plan, corrected by how long its runs took. Members without a part are
/// taken for as fast as the others on average.
fn found_speeds(members: &[Member], job: &FleetJob, all: &[Assignment]) -> Vec<f64> {
    let speed = |assignment: &Assignment| {
        let cost: f64 = assignment.parts.iter().map(|(part, _)| part.cost(&|frame| job.cut_cost(frame))).sum();
        let seconds = members[assignment.member].expected_seconds(job.direction(), &assignment.parts);
        (seconds > 0.0).then_some(cost / seconds)
    };
    let known: Vec<Option<f64>> = all.iter().map(speed).collect();
    let (sum, count) = known.iter().flatten().fold((0.0, 0), |(sum, count), speed| (sum + speed, count + 1));
    let mean = if count == 0 { 1.0 } else { sum / f64::from(count) };
    members
        .iter()
        .zip(known)
        .map(|(member, speed)| if member.is_able() { speed.unwrap_or(mean) } else { 0.0 })
        .collect()
}

/// The report of a whole job: sums, and what each device does. `took`: seconds of each member, if it ran.
pub fn report(members: &[Member], job: &FleetJob, all: &[Assignment], took: &[f64], mixed: bool) -> Result<PlanReport> {
    let parts = |index| all.iter().filter(move |a| a.member == index).flat_map(|a| &a.parts);
    // A member's parts run one after the other, in the same memory.
    let most = |index, bytes: fn(&PlanReport) -> u64| parts(index).map(|(_, plan)| bytes(plan)).max().unwrap_or(0);
    let device = |(index, member): (usize, &Member)| {
        let own: Vec<_> = parts(index).cloned().collect();
        DeviceReport {
            device: member.session.place().to_string(),
            parts: parts(index).map(|(part, _)| (part.clips.clone(), job.clip_frames(part))).collect(),
            seconds: member.expected_seconds(job.direction(), &own),
            measured_seconds: took.get(index).copied().unwrap_or(0.0),
            device_bytes: most(index, |plan| plan.device_bytes),
            host_bytes: most(index, |plan| plan.host_bytes),
            unused: member.failure().filter(|_| own.is_empty()).map(|error| error.to_string()),
        }
    };
    let devices: Vec<DeviceReport> = members.iter().enumerate().map(device).collect();
    let plans = || all.iter().flat_map(|a| &a.parts).map(|(_, plan)| plan);
    let Some(first) = plans().next() else { return Err(Error::Internal("a job without parts".into())) };
    let sum = |bytes: fn(&PlanReport) -> u64| (0..members.len()).map(|index| most(index, bytes)).sum::<u64>();
    let whole = job.whole();
    let range = job.range(&whole);
    let seconds = devices.iter().map(|device| device.seconds).fold(0.0, f64::max);
    let useful: f64 = members.iter().map(|member| member.speed(job.direction())).sum::<f64>() * seconds;
    let cost = whole.cost(&|frame| if frame == 0 { job.cut_cost(0) } else { 0.0 });
    Ok(PlanReport {
        range: FrameRange {
            first: range.map_or(0, |range| range.first),
            end: range.and_then(|range| Some(range.first + range.count?)),
        },
        input: job.input_shape(),
        output: Shape { batch: job.clip.batch, frames: whole.frame_count(), ..first.output },
        device_bytes: sum(|plan| plan.device_bytes),
        host_bytes: sum(|plan| plan.host_bytes),
        offloaded_bytes: sum(|plan| plan.offloaded_bytes),
        weight_bytes: sum(|plan| plan.weight_bytes),
        offloaded_weight_bytes: sum(|plan| plan.offloaded_weight_bytes),
        workspace_bytes: sum(|plan| plan.workspace_bytes),
        moved_per_frame: plans().map(|plan| plan.moved_per_frame).max().unwrap_or(0),
        seconds,
        exact: plans().all(|plan| plan.exact),
        division: Some(DeviceDivision {
            devices,
            efficiency: if useful > 0.0 { (cost / useful).min(1.0) } else { 0.0 },
            mixed,
            round: None,
        }),
        ..first.clone()
    })
}
