//! Who computes what: divides a job by the members' speeds, with a plan for every part. Must not run anything.

use std::sync::atomic::AtomicBool;

use super::divide;
use super::job::{FleetJob, PlannedPart};
use super::member::{self, Member};
use crate::error::{Error, Result};
use crate::exec::PlanKind;
use crate::ir::Shape;
use crate::report::{DeviceDivision, DeviceReport, Part, PlanReport};
use crate::thread_pool::at_once;

/// Divisions that are tried while estimates still change.
const TRIES: usize = 3;
/// A division is kept unless another one takes this share of its time.
const WORTH_ANOTHER: f64 = 0.97;

/// Divides a part of a job among the members that can do it, with plans. Members that cannot plan their share are left
/// out.
pub fn assign(members: &mut [Member], job: &FleetJob, part: &Part, cancel: &AtomicBool) -> Result<()> {
    let cut = |frame: u64| job.cut_cost(frame);
    let (direction, step) = (job.network.direction, job.cut_step(members.len()));
    let mut tries = 0;
    loop {
        let speeds: Vec<f64> = members.iter().map(|member| member.speed(direction)).collect();
        if speeds.iter().all(|speed| *speed == 0.0) {
            let failed = members.iter().find_map(Member::failure);
            return Err(failed.unwrap_or_else(|| Error::Internal("no device is left, but none failed".into())));
        }
        let division = divide::divide(part, &speeds, &cut, step);
        let planned = plan(members, job, &division, cancel);
        for (member, planned) in members.iter_mut().zip(planned) {
            match planned {
                Ok(parts) => member.todo = parts,
                Err(error) if member::is_of_device(&error) => member.leave_out(error),
                Err(error) => return Err(error),
            }
        }
        let is_short = members.iter().zip(&speeds).any(|(member, speed)| *speed > 0.0 && !member.is_able());
        if is_short || leave_out_tiled(members) {
            continue;
        }
        tries += 1;
        let found = found_speeds(members, job);
        members.iter_mut().zip(&found).for_each(|(member, speed)| member.set_speed(direction, *speed));
        let took = divide::seconds(&division, &found, &cut);
        let better = divide::seconds(&divide::divide(part, &found, &cut, step), &found, &cut);
        if tries == TRIES || better >= WORTH_ANOTHER * took {
            return Ok(());
        }
    }
}

/// Leaves out members that could only work in tiles, if others can do without: tiles are not exact.
fn leave_out_tiled(members: &mut [Member]) -> bool {
    let is_tiled = |member: &Member| member.todo.iter().any(|planned| planned.plan.is_tiled());
    let busy = members.iter().filter(|member| !member.todo.is_empty()).count();
    let tiled = members.iter().filter(|member| is_tiled(member)).count();
    if tiled == 0 || tiled == busy {
        return false;
    }
    for member in members.iter_mut().filter(|member| is_tiled(member)) {
        member.leave_out(Error::Memory(
            "memory_limit: its part would fit in tiles only, which is not exact; raise its limit".into(),
        ));
    }
    true
}

/// The plans of each member's parts. Parts that are alike, of members of one kind, are planned once.
fn plan(
    members: &mut [Member],
    job: &FleetJob,
    division: &[Vec<Part>],
    cancel: &AtomicBool,
) -> Vec<Result<Vec<PlannedPart>>> {
    let kinds: Vec<PlanKind> = members.iter().map(|member| member.session.plan_kind()).collect();
    // Of what the members plan: who has a plan for a part, and which.
    let find = |own: &[Vec<Part>], index: usize, part: &Part| {
        let mut of_kind = (0..=index).filter(|member| kinds[*member] == kinds[index]);
        let alike = |member: usize| own[member].iter().position(|planned| job.is_alike(planned, part));
        of_kind.find_map(|member| Some((member, alike(member)?)))
    };
    let mut own: Vec<Vec<Part>> = vec![Vec::new(); members.len()];
    for (index, parts) in division.iter().enumerate() {
        for part in parts {
            if find(&own, index, part).is_none() {
                own[index].push(part.clone());
            }
        }
    }
    let plan_own = |(member, parts): (&mut Member, &Vec<Part>)| -> Vec<Result<PlanReport>> {
        parts.iter().map(|part| member.session.plan(&job.shape(part), None, cancel)).collect()
    };
    let planned = at_once(members.iter_mut().zip(&own).collect(), plan_own, || ());
    let plan_of = |index: usize, part: &Part| {
        let (member, at) = find(&own, index, part).ok_or_else(|| Error::Internal("a part that nobody plans".into()))?;
        let mut plan = planned[member].as_ref().map_err(Error::clone)?[at].clone()?;
        plan.range = job.frame_range(part);
        Ok(PlannedPart { part: part.clone(), plan })
    };
    let of_member = |(index, parts): (usize, &Vec<Part>)| parts.iter().map(|part| plan_of(index, part)).collect();
    division.iter().enumerate().map(of_member).collect()
}

/// Frames a second of each member: those of its plan, corrected by how long its runs took. Members without a part are
/// taken for as fast as the others on average.
fn found_speeds(members: &[Member], job: &FleetJob) -> Vec<f64> {
    let speed = |member: &Member| {
        let cost: f64 = member.todo.iter().map(|planned| job.cost(&planned.part)).sum();
        let seconds = member.expected_seconds(job.network.direction, member.todo.iter());
        (seconds > 0.0).then_some(cost / seconds)
    };
    let known: Vec<Option<f64>> = members.iter().map(speed).collect();
    let (sum, count) = known.iter().flatten().fold((0.0, 0), |(sum, count), speed| (sum + speed, count + 1));
    let mean = if count == 0 { 1.0 } else { sum / f64::from(count) };
    let found = members.iter().zip(known);
    found.map(|(member, speed)| if member.is_able() { speed.unwrap_or(mean) } else { 0.0 }).collect()
}

/// The report of a whole job: sums, and what each device does.
pub fn report(members: &[Member], job: &FleetJob, mixed: bool) -> Result<PlanReport> {
    let device = |member: &Member| DeviceReport {
        device: member.session.place().to_string(),
        parts: member.parts().map(|planned| planned.part.clone()).collect(),
        seconds: member.expected_seconds(job.network.direction, member.parts()),
        measured_seconds: member.seconds,
        device_bytes: member.most(|plan| plan.device_bytes),
        host_bytes: member.most(|plan| plan.host_bytes),
        unused: member.failure().filter(|_| member.parts().next().is_none()).map(|error| error.to_string()),
    };
    let devices: Vec<DeviceReport> = members.iter().map(device).collect();
    let plans = || members.iter().flat_map(Member::parts).map(|planned| &planned.plan);
    let Some(first) = plans().next() else { return Err(Error::Internal("a job without parts".into())) };
    let sum = |bytes: fn(&PlanReport) -> u64| members.iter().map(|member| member.most(bytes)).sum::<u64>();
    let seconds = devices.iter().map(|device| device.seconds).fold(0.0, f64::max);
    let useful: f64 = members.iter().map(|member| member.speed(job.network.direction)).sum::<f64>() * seconds;
    Ok(PlanReport {
        range: job.frame_range(&job.whole),
        input: job.input_shape(),
        output: Shape { batch: job.clip.batch, frames: job.whole.frame_count(), ..first.output },
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
            efficiency: if useful > 0.0 { (job.cost(&job.whole) / useful).min(1.0) } else { 0.0 },
            mixed,
            round: None,
        }),
        ..first.clone()
    })
}
