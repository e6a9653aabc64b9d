//! `--json` of every command: one shape, with the keys that the command's README lists.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::command::{out, succeeds, text, vvae, y4m};
use crate::common::root;
use crate::common::safetensors::Folder;
use serde_json::Value;

/// The table of README.md: keys of a result by command.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let text = std::fs::read_to_string(root().join("host-examples/rust/README.md")).expect("a README");
    let table = text.split_once("## JSON").expect("a section about JSON").1;
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let keys = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    rows.map(|(command, cell)| (command.to_owned(), keys(cell))).collect()
}

fn keys(value: &Value) -> BTreeSet<String> {
    value.as_object().expect("an object").keys().cloned().collect()
}

#[test]
fn every_command_has_the_documented_shape() {
    let folder = Folder::new("json");
    let (a, b) = (folder.file("a.y4m", &y4m(16, 16, 2)), folder.file("b.y4m", &y4m(16, 16, 2)));
    let weights = crate::common::small();
    let cases: [(&str, Vec<&str>); 8] = [
        ("info", vec!["info"]),
        ("info FILE", vec!["info", text(&weights)]),
        ("devices", vec!["devices"]),
        ("plan", vec!["plan", "--decode", "5x64x64", "--encode", "50x64x64", "--device", "cpu"]),
        ("bench", vec!["bench", "--device", "cpu", "--shapes", "1x16x16", "--repeat", "1"]),
        ("compare", vec!["compare", text(&a), "--device", "cpu"]),
        ("compare", vec!["compare", text(&a), text(&b)]),
        ("check", vec!["check", text(&weights), "--device", "cpu", "--shape", "1x16x16"]),
    ];
    let documented = documented();
    for (name, words) in &cases {
        let output = vvae(&[&words[..], &["--json", "-"]].concat()).output().expect("it starts");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        let told: Value = serde_json::from_str(&out(&output)).unwrap_or_else(|why| panic!("{words:?}: {why}"));
        assert_eq!(keys(&told), ["command", "json", "results", "version"].map(str::to_owned).into(), "{words:?}");
        assert_eq!((&told["json"], told["command"].as_str()), (&1.into(), name.split(' ').next()), "{words:?}");
        let results = told["results"].as_array().expect("a list");
        assert!(!results.is_empty(), "{words:?}");
        for result in results {
            assert_eq!(Some(&keys(result)), documented.get(*name), "{words:?}");
        }
        // The text is on standard error, and -q leaves it out.
        assert!(!output.stderr.is_empty(), "{words:?}");
        let quiet = vvae(&[&words[..], &["--json", "-", "-q"]].concat()).output().expect("it starts");
        assert_eq!(String::from_utf8_lossy(&quiet.stderr), "", "{words:?}");
    }
    let tried: BTreeSet<&str> = cases.iter().map(|(name, _)| *name).collect();
    assert_eq!(documented.keys().map(String::as_str).collect::<BTreeSet<_>>(), tried);
}

#[test]
fn figures_are_those_of_the_text() {
    let folder = Folder::new("json-figures");
    let file = folder.0.join("plan.json");
    let said = succeeds(&["plan", "--decode", "50x64x64", "--device", "cpu", "--json", text(&file)]);
    let told: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let plan = &told["results"][0];
    assert!(said.contains(plan["text"].as_str().unwrap().trim_end()), "{said}");
    assert_eq!((&plan["whole"], &plan["exact"], &plan["frames"]), (&false.into(), &true.into(), &50.into()));
    assert!(plan["seconds"].as_f64() > Some(0.0) && plan["devices"][0].as_str().unwrap().starts_with("cpu"));
    assert!(said.contains("on cpu"), "{said}");

    // A page about one clip through the model.
    let (clip, page) = (folder.file("clip.y4m", &y4m(32, 16, 3)), folder.0.join("page.html"));
    succeeds(&["compare", text(&clip), "--device", "cpu", "--report", text(&page)]);
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("and back in fp32") && html.contains("<dt>bf16</dt>"), "{html}");
}
