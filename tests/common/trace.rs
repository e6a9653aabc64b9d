//! Reads a trace, and compares it with the plan.

use std::path::Path;

use serde_json::Value;

use super::Vae;

/// A lane of a trace: its name, and its operations in the order of the file.
pub struct Lane {
    key: (u64, u64),
    pub name: String,
    pub events: Vec<Value>,
}

fn key(event: &Value) -> (u64, u64) {
    (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap())
}

/// The lanes of a trace. Each has a device and a name.
pub fn lanes(path: &Path) -> Vec<Lane> {
    let text = std::fs::read_to_string(path).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap_or_else(|why| panic!("{why}: {text}"));
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |what: &str, lane: (u64, u64)| {
        let found = events.iter().find(|event| event["ph"] == "M" && event["name"] == what && key(event) == lane);
        found.unwrap_or_else(|| panic!("lane {lane:?} has no {what}"))["args"]["name"].as_str().unwrap().to_owned()
    };
    let mut lanes: Vec<Lane> = Vec::new();
    for event in events.iter().filter(|event| event["ph"] != "M") {
        assert_eq!(event["ph"], "X");
        let key = key(event);
        if !lanes.iter().any(|lane| lane.key == key) {
            named("process_name", key);
            lanes.push(Lane { key, name: named("thread_name", key), events: Vec::new() });
        }
        lanes.iter_mut().find(|lane| lane.key == key).unwrap().events.push(event.clone());
    }
    lanes
}

/// Checks that operations of a lane do not overlap. Returns their names, and their seconds in all.
pub fn names(events: &[Value]) -> (Vec<&str>, f64) {
    let mut free = 0.0;
    let mut seconds = 0.0;
    for event in events {
        let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        assert!(ts >= free && dur >= 0.0, "{event} begins before {free}");
        // Numbers have a tenth of a microsecond. A GPU counts half a microsecond.
        free = ts + dur - 0.6;
        seconds += dur / 1e6;
    }
    (events.iter().map(|event| event["name"].as_str().unwrap()).collect(), seconds)
}

/// The steps of a plan by their names.
pub fn planned(vae: &Vae, node: &str, shape: [i64; 5]) -> Vec<String> {
    let timeline = vae.timeline(node, shape).unwrap();
    assert_eq!(timeline["devices"][0]["complete"], true);
    let steps = timeline["devices"][0]["steps"].as_array().unwrap();
    steps.iter().map(|step| step["name"].as_str().unwrap().to_owned()).collect()
}
