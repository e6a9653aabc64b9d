//! The papers are current: the table of parameters in docs/abi.md, the README's C program, and the files that it links
//! to.

mod common;

use std::process::Command;

use common::safetensors::Folder;
use common::{library_path, root, small};

#[test]
fn documented_parameters_match_the_node_table() {
    let path = root().join("docs/abi.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let start = text.find("<!-- parameters").unwrap();
    let start = start + text[start..].find("-->\n").unwrap() + 4;
    let end = text.find("<!-- end of parameters -->").unwrap();
    let expected = format!("\n{}\n", video_vae::node::markdown());
    if std::env::var_os("VVAE_UPDATE_README").is_some() {
        std::fs::write(&path, [&text[..start], &expected, &text[end..]].concat()).unwrap();
        return;
    }
    assert!(text[start..end] == expected, "stale; run: VVAE_UPDATE_README=1 cargo test --release --test readme");
}

#[test]
fn readme_c_program_compiles_and_runs() {
    let text = std::fs::read_to_string(root().join("README.md")).unwrap();
    let program = text.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = Folder::new("readme");
    let source = folder.file("demo.c", program.as_bytes());
    let (library, executable) = (library_path(), folder.0.join("demo"));
    let libraries = library.parent().unwrap();
    let compiler = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-I"])
        .arg(root().join("include"))
        .arg(&source)
        .arg("-L")
        .arg(libraries)
        .args(["-lvideo_vae", "-o"])
        .arg(&executable)
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .output();
    let Ok(compiled) = compiler else {
        assert!(std::env::var_os("CI").is_none(), "no C compiler");
        println!("skipped: no C compiler");
        return;
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let run = Command::new(&executable).arg(small()).output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert!(said.contains("untiled: exact"), "{said}");
}

#[test]
fn readme_links_exist() {
    let text = std::fs::read_to_string(root().join("README.md")).unwrap();
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let files: Vec<_> = targets.filter(|target| !target.starts_with('#') && !target.contains("://")).collect();
    assert!(files.contains(&"host-examples/assets/demo.png"), "{files:?}");
    for file in files {
        assert!(root().join(file).exists(), "{file}");
    }
}
