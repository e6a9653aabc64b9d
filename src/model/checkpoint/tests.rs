//! Checkpoints open, and refusals name the file, the tensor and what was expected.

use std::fs::File;
use std::path::Path;

use super::contents::Contents;
use super::header::MAX_TENSORS;
use super::source::Source;
use super::testing::*;
use super::*;
use crate::error::Error;
use crate::ir::DType;
use crate::model::families::seedvr2::Sizes;
use crate::safetensors::quoted;
use crate::testing::golden;

fn small() -> Sizes {
    Sizes { channels: vec![4, 6, 4], layers: 2, groups: 2, latent: 3, temporal_levels: 1 }
}

fn tensors() -> Vec<TestTensor> {
    random(&small(), DType::F16)
}

fn find<'a>(tensors: &'a mut [TestTensor], name: &str) -> &'a mut TestTensor {
    tensors.iter_mut().find(|t| t.name == name).unwrap()
}

/// The message, which must begin with the file's name.
fn refusal(bytes: &[u8]) -> String {
    let file = TemporaryFile::new(bytes);
    let error = Checkpoint::open(&file.0).unwrap_err();
    assert!(matches!(error, Error::Checkpoint(_)), "{error:?}");
    let message = error.to_string();
    message.strip_prefix(&format!("{}: ", file.0.display())).expect(&message).to_string()
}

#[track_caller]
fn assert_refused(bytes: &[u8], parts: &[&str]) {
    let message = refusal(bytes);
    assert!(parts.iter().all(|part| message.contains(part)), "{message:?} lacks one of {parts:?}");
}

/// Of a file with two groups.
#[track_caller]
fn assert_tensors_refused(tensors: &[TestTensor], parts: &[&str]) {
    assert_refused(&write(tensors, 2), parts);
}

#[test]
fn golden_checkpoints_open_with_their_configurations() {
    for (name, channels, layers, groups) in [("small", [16, 32, 32, 32], 1, 16), ("medium", [32, 32, 32, 64], 2, 32)] {
        let open = Checkpoint::open(&golden(name)).unwrap();
        let expected = Sizes { channels: channels.to_vec(), layers, groups, latent: 16, temporal_levels: 2 };
        assert_eq!(open.model().sizes, expected.model().sizes);
        assert!(open.path().ends_with(format!("{name}.safetensors")));
    }
}

#[test]
fn values_come_back_in_every_type() {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let open = checkpoint(&small(), dtype);
        assert_eq!(open.model().sizes, small().model().sizes);
        for tensor in random(&small(), dtype) {
            let found = open.tensor(&tensor.name).unwrap();
            assert_eq!((found.dtype, found.shape), (dtype, &*tensor.shape), "{}", tensor.name);
            let mut bytes = vec![0; tensor.bytes.len()];
            open.source.read(&mut bytes, found.start).unwrap();
            assert_eq!(bytes, tensor.bytes, "{}", tensor.name);
        }
        assert!(open.tensor("encoder.conv_in.bias.x").is_err());
    }
}

#[test]
fn one_level_models_and_files_without_metadata_open() {
    let one = Sizes { channels: vec![32], layers: 1, groups: 32, latent: 1, temporal_levels: 0 };
    let file = TemporaryFile::new(&write_with(&random(&one, DType::BF16), ""));
    assert_eq!(Checkpoint::open(&file.0).unwrap().model().sizes, one.model().sizes);
}

#[test]
fn older_attention_files_hold_the_same_weights() {
    let renamed = [(".to_q.", ".query."), (".to_k.", ".key."), (".to_v.", ".value."), (".to_out.0.", ".proj_attn.")];
    let newer = checkpoint(&small(), DType::F16);
    for (rename, ones) in [(true, 2), (true, 0), (true, 3), (false, 2), (false, 3)] {
        let mut older = tensors();
        for tensor in &mut older {
            if let Some((new, old)) = renamed.iter().find(|(new, _)| tensor.name.contains(new)) {
                if tensor.shape.len() == 2 {
                    tensor.shape.resize(2 + ones, 1);
                }
                if rename {
                    tensor.name = tensor.name.replace(new, old);
                }
            }
        }
        let file = TemporaryFile::new(&write(&older, 2));
        let older = Checkpoint::open(&file.0).unwrap();
        for tensor in tensors() {
            let (one, other) = (newer.tensor(&tensor.name).unwrap(), older.tensor(&tensor.name).unwrap());
            assert_eq!((one.shape, one.read_all()), (other.shape, other.read_all()), "{}", tensor.name);
        }
    }
    let mut both = tensors();
    let mut older = find(&mut both, "decoder.mid_block.attentions.0.to_k.weight").clone();
    older.name = older.name.replace("to_k", "key");
    both.push(older);
    assert_tensors_refused(
        &both,
        &["attentions.0.key.weight\"", "also present as", "attentions.0.to_k.weight\"", "expected one"],
    );
}

#[test]
fn missing_and_irregular_files_are_refused() {
    let missing = Checkpoint::open(Path::new("/nowhere/x.safetensors")).unwrap_err().to_string();
    assert!(missing.starts_with("/nowhere/x.safetensors: cannot be opened: "), "{missing}");
    let directory = Checkpoint::open(&std::env::temp_dir()).unwrap_err().to_string();
    assert!(directory.contains("is a directory, expected a safetensors file"), "{directory}");
    assert_refused(&[], &["is empty, expected a safetensors file"]);
    #[cfg(unix)]
    assert!(Checkpoint::open(Path::new("/dev/null")).unwrap_err().to_string().contains("not a regular file"));
}

#[test]
fn damaged_headers_are_refused() {
    assert_refused(&[1, 2, 3], &["the file has 3 bytes, too few"]);
    assert_refused(&u64::MAX.to_le_bytes(), &["the header claims 18446744073709551615 bytes, expected at most"]);
    assert_refused(&[200, 0, 0, 0, 0, 0, 0, 0, b'{'], &["the header claims 200 bytes, but only 1 follow"]);
    assert_refused(&with_header("{\"a\":", &[]), &["the header is not valid JSON", "line 1"]);
    assert_refused(&with_header(&"[".repeat(1 << 20), &[]), &["not a JSON object"]);
    assert_refused(&with_header("[1, 2]", &[]), &["not a JSON object"]);
    assert_refused(&[&[2, 0, 0, 0, 0, 0, 0, 0][..], &[0xff, 0xfe]].concat(), &["the header is not UTF-8"]);
    assert_refused(&with_header("{}", &[]), &["\"encoder.down_blocks.0.resnets....\" is missing"]);
}

#[test]
fn keys_that_occur_twice_are_refused() {
    let entry = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
    for twice in ["a", r"\u0061"] {
        assert_refused(&with_header(&format!(r#"{{"a":{entry},"{twice}":{entry}}}"#), &[]), &["the key \"a\" twice"]);
    }
    assert_refused(&with_header(r#"{"a":{"dtype":"F32","dtype":"F32"}}"#, &[]), &["the key \"dtype\" twice"]);
    let metadata = r#""__metadata__":{"norm_num_groups":"2","norm_num_groups":"2"}"#;
    assert_refused(&write_with(&tensors(), metadata), &["the key \"norm_num_groups\" twice"]);
    assert_refused(&with_header(r#"{"__metadata__":{},"__metadata__":{}}"#, &[]), &["the key \"__metadata__\" twice"]);
}

/// Headers that ask for much memory, each of about a megabyte, and a word of the refusal.
fn greedy_headers() -> Vec<(String, &'static str)> {
    const SIZE: usize = 1 << 20;
    let entry = r#"{"dtype":"F16","shape":[0],"data_offsets":[0,0]}"#;
    let list = |count: usize, one: &dyn Fn(usize) -> String| (0..count).map(one).collect::<Vec<String>>().join(",");
    let with = |field: String| format!(r#"{{"t":{{{field}}}}}"#);
    vec![
        (format!("{{{}}}", list(SIZE / 60, &|i| format!(r#""{i:x}":{entry}"#))), "is missing"),
        (format!("{{{}}}", list(MAX_TENSORS + 1, &|i| format!(r#""{i:x}":0"#))), "has 65537 tensors, expected at most"),
        (with(format!(r#""shape":[{}]"#, list(SIZE / 2, &|_| "0".into()))), "dtype is missing"),
        (with(format!(r#""dtype":"F16","shape":[{}]"#, list(SIZE / 2, &|_| "0".into()))), "shape is missing"),
        (with(format!(r#""dtype":"{}""#, "F".repeat(SIZE))), "dtype is missing"),
        (with(format!(r#""x":{}{}"#, "[".repeat(SIZE / 2), "]".repeat(SIZE / 2))), "dtype is missing"),
        (with(list(SIZE / 9, &|i| format!(r#""{i:x}":{{}}"#))), "dtype is missing"),
        (format!(r#"{{"__metadata__":{{{}}}}}"#, list(SIZE / 9, &|i| format!(r#""{i:x}":[]"#))), "is missing"),
        (format!(r#"{{"__metadata__":{{"norm_num_groups":"{}"}}}}"#, "\\n".repeat(SIZE / 2)), "is missing"),
        (format!(r#"{{"{}":{entry}}}"#, "n".repeat(SIZE)), "is missing"),
        (format!(r#"{{"\n{}":{entry}}}"#, "n".repeat(SIZE)), "is missing"),
        (format!(r#"{{".attentions.0.query.{}":{entry}}}"#, "n".repeat(SIZE)), "is missing"),
    ]
}

#[test]
fn headers_take_at_most_four_times_their_size() {
    for (header, why) in greedy_headers() {
        let file = TemporaryFile::new(&with_header(&header, &[]));
        let source =
            Source { path: file.0.clone(), file: File::open(&file.0).unwrap(), length: 8 + header.len() as u64 };
        let (refused, peak) = peak_bytes(|| Contents::of_header(&source, None).unwrap_err());
        let start = &header[..60];
        assert!(refused.contains(why), "{start}: {refused}");
        assert!(peak <= 4 * header.len(), "{start}: {peak} bytes for a header of {}", header.len());
    }
}

#[test]
fn damaged_entries_are_refused() {
    let entry = |entry: &str| with_header(&format!(r#"{{"t.x":{entry}}}"#), &[0; 64]);
    let cases = [
        ("3", "not a JSON object"),
        (r#"{"shape":[8],"data_offsets":[0,64]}"#, "dtype is missing, expected F16, BF16 or F32"),
        (r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,64]}"#, "shape is missing or not an array"),
        (r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,64]}"#, "shape is missing or not an array"),
        (r#"{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}"#, "9 dimensions, expected at most 8"),
        (r#"{"dtype":"F32","shape":[16],"data_offsets":[0]}"#, "data_offsets has 1 numbers, expected begin and end"),
        (r#"{"dtype":"F32","shape":[16],"data_offsets":[64,0]}"#, "data_offsets are [64, 0], expected an interval"),
        (r#"{"dtype":"F32","shape":[17],"data_offsets":[0,68]}"#, "expected an interval within the 64 bytes"),
        (
            r#"{"dtype":"F32","shape":[15],"data_offsets":[0,64]}"#,
            "it has 64 bytes of data, expected 60 for shape [15]",
        ),
        (
            r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}"#,
            "expected more than can be counted",
        ),
    ];
    for (text, why) in cases {
        assert_refused(&entry(text), &["tensor \"t.x\": ", why]);
    }
    let one = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let other = r#"{"dtype":"F32","shape":[2],"data_offsets":[4,12]}"#;
    let overlapping = with_header(&format!(r#"{{"one":{one},"other":{other}}}"#), &[0; 64]);
    assert_refused(&overlapping, &["tensor \"other\": its data overlap those of tensor \"one\", expected separate"]);
}

#[test]
fn missing_and_extra_tensors_are_named() {
    for tensor in tensors() {
        let mut without = tensors();
        without.retain(|t| t.name != tensor.name);
        assert_tensors_refused(&without, &[&format!("tensor {:?} is missing", tensor.name)]);
    }
    let mut more = tensors();
    more.push(TestTensor::new("decoder.conv_in.scale", DType::F16, &[1], &[0.0]));
    assert_tensors_refused(&more, &["tensor \"decoder.conv_in.scale\" is not part of this model", "expected only its"]);
}

#[test]
fn wrong_shapes_are_named_with_the_right_one() {
    let mut flat = tensors();
    let tensor = find(&mut flat, "decoder.conv_in.weight");
    tensor.shape.pop();
    tensor.bytes.truncate(tensor.bytes.len() / 3);
    let file = TemporaryFile::new(&write(&flat, 2));
    assert_eq!(
        Checkpoint::open(&file.0).unwrap_err().to_string(),
        format!(
            "{}: tensor \"decoder.conv_in.weight\": shape is [4, 3, 3, 3], expected [4, 3, 3, 3, 3]; the nearest \
             family of autoencoders is seedvr2",
            file.0.display()
        )
    );
    let mut words = tensors();
    find(&mut words, "decoder.conv_in.weight").dtype = "U16";
    assert_tensors_refused(&words, &["decoder.conv_in.weight\": dtype is \"U16\", expected F16, BF16 or F32"]);
    let mut turned = tensors();
    find(&mut turned, "decoder.up_blocks.0.upsamplers.0.upscale_conv.weight").shape.swap(0, 1);
    assert_tensors_refused(&turned, &["upscale_conv.weight\": shape is [4, 32, 1, 1, 1], expected [32, 4, 1, 1, 1]"]);
}

#[test]
fn implausible_configurations_are_refused() {
    // Without values, so that files stay small.
    let tensor = |name: &str, shape: &[u64]| TestTensor::new(name, DType::F16, shape, &[]);
    let conv1 = |level: u64| format!("encoder.down_blocks.{level}.resnets.0.conv1.weight");
    assert_tensors_refused(&[tensor(&conv1(8), &[0])], &["imply 9 resolution levels, expected 1 to 8"]);
    let levels = u64::MAX;
    assert_tensors_refused(&[tensor(&conv1(levels), &[0])], &["resolution levels, expected 1 to 8"]);
    let layer = "encoder.down_blocks.0.resnets.16.conv1.weight";
    assert_tensors_refused(&[tensor(layer, &[0])], &["imply 17 residual blocks a level, expected 1 to 16"]);
    let wide = [tensor(&conv1(0), &[16385, 0])];
    assert_tensors_refused(&wide, &[&conv1(0), "shape is [16385, 0], with 16385 output channels; expected 1 to 16384"]);
    assert_tensors_refused(&[tensor(&conv1(0), &[0])], &["with 0 output channels; expected 1 to"]);
    let latent = [TestTensor::new(&conv1(0), DType::F16, &[1], &[0.0]), tensor("decoder.conv_in.weight", &[1, 0])];
    assert_tensors_refused(&latent, &["decoder.conv_in.weight", "with 0 input channels"]);
}

#[test]
fn temporal_downsamplers_must_be_innermost() {
    let config = Sizes { channels: vec![4, 4, 4], temporal_levels: 1, ..small() };
    let mut swapped = random(&config, DType::F16);
    let name = |level: u32| format!("encoder.down_blocks.{level}.downsamplers.0.conv.weight");
    for tensor in &mut swapped {
        if tensor.name == name(0) {
            tensor.name = name(1);
        } else if tensor.name == name(1) {
            tensor.name = name(0);
        }
    }
    assert_tensors_refused(&swapped, &[&name(1), "[4, 4, 1, 3, 3]", "temporal kernel 3 to be the innermost"]);
    let mut deep = random(&config, DType::F16);
    let tensor = find(&mut deep, &name(1));
    (tensor.shape[2], tensor.shape[3]) = (9, 1);
    assert_tensors_refused(&deep, &[&name(1), "shape is [4, 4, 9, 1, 3], expected five dimensions, the third 1 or 3"]);
}

#[test]
fn bad_groups_are_refused() {
    let metadata = |value: &str| write_with(&tensors(), &format!(r#""__metadata__":{{"norm_num_groups":{value}}}"#));
    for bad in ["\"0\"", "\"-4\"", "\"two\"", "\"\"", "2", "null", "\"99999999999999999999\""] {
        let shown = &quoted(bad);
        assert_refused(&metadata(bad), &["norm_num_groups in the file's metadata is", shown, "positive whole number"]);
    }
    assert_refused(
        &metadata("\"4\""),
        &["norm_num_groups is 4 (in the file's metadata), expected a divisor", "level 1 has 6"],
    );
    assert_refused(&write_with(&tensors(), ""), &["norm_num_groups is 32 (assumed", "level 0 has 4"]);
    assert_refused(&write_with(&tensors(), r#""__metadata__":[]"#), &["__metadata__ is not a JSON object"]);
}

#[test]
fn non_finite_values_are_named_with_their_coordinates() {
    for (dtype, bad, shown) in [(DType::F16, f32::NAN, "NaN"), (DType::BF16, f32::INFINITY, "inf")] {
        let mut damaged = random(&small(), dtype);
        let name = "encoder.conv_in.weight";
        let tensor = find(&mut damaged, name);
        let values = vec![bad; tensor.bytes.len() / 2];
        let whole = TestTensor::new(name, dtype, &tensor.shape, &values);
        let element = 81 + 27 + 9 + 3 + 2;
        tensor.bytes[2 * element..].copy_from_slice(&whole.bytes[2 * element..]);
        let message = format!("element {element}, at [1, 1, 1, 1, 2], is {shown}; expected finite values");
        assert_tensors_refused(&damaged, &[name, &message]);
    }
}

// Other systems cannot remove an open file.
#[cfg(unix)]
#[test]
fn changed_files_are_detected() {
    let file = TemporaryFile::new(&write(&tensors(), 2));
    let open = Checkpoint::open(&file.0).unwrap();
    assert_eq!(open.identity(), Checkpoint::open(&file.0).unwrap().identity());
    open.verify_unchanged().unwrap();
    // Replaced, not rewritten: the open file stays the old one.
    std::fs::remove_file(&file.0).unwrap();
    assert!(open.verify_unchanged().unwrap_err().to_string().contains("can no longer be found"));
    std::fs::write(&file.0, write(&tensors()[1..], 2)).unwrap();
    assert!(open.verify_unchanged().unwrap_err().to_string().contains("has changed since it was opened"));
}

/// Changes the last value of a file in place, and sets its time of modification back.
#[cfg(unix)]
fn change_in_place(path: &Path) {
    use std::os::unix::fs::FileExt;
    let file = File::options().read(true).write(true).open(path).unwrap();
    let before = file.metadata().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, before.len() - 2).unwrap();
    file.write_all_at(&[byte[0] ^ 1], before.len() - 2).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
}

#[cfg(unix)]
#[test]
fn contents_decide_where_only_the_time_of_change_differs() {
    use std::os::unix::fs::PermissionsExt;
    let file = TemporaryFile::new(&write(&tensors(), 2));
    let open = Checkpoint::open(&file.0).unwrap();
    std::fs::set_permissions(&file.0, PermissionsExt::from_mode(0o600)).unwrap();
    open.verify_unchanged().expect("other permissions are no other contents");
    open.file().open().unwrap();
    change_in_place(&file.0);
    assert!(open.verify_unchanged().unwrap_err().to_string().contains("has changed since it was opened"));
    let reopened = open.file().open();
    assert!(reopened.unwrap_err().to_string().contains("has changed since the handle was created"));
}

#[test]
fn files_cut_short_after_opening_are_an_error() {
    let file = TemporaryFile::new(&write(&tensors(), 2));
    let open = Checkpoint::open(&file.0).unwrap();
    let cut = std::fs::OpenOptions::new().write(true).open(&file.0).unwrap();
    for length in [open.source.length - 1, 100, 0] {
        cut.set_len(length).unwrap();
        let read = |name: &str| open.tensor(name).and_then(|tensor| tensor.read_all());
        let refusals = tensors().iter().filter_map(|tensor| read(&tensor.name).err()).collect::<Vec<_>>();
        assert!(refusals.len() == if length > 100 { 1 } else { tensors().len() });
        for refusal in refusals {
            let message = format!("{}: the file was cut short while it was read", file.0.display());
            assert_eq!(refusal, Error::Checkpoint(message));
        }
        assert!(open.verify_unchanged().is_err());
    }
}

#[test]
fn files_cut_short_before_they_are_read_are_an_error() {
    let whole = write(&tensors(), 2);
    let file = TemporaryFile::new(&whole);
    for length in [0, 7, 8, 100, whole.len() - 1] {
        std::fs::write(&file.0, &whole[..length]).unwrap();
        let source = Source { path: file.0.clone(), file: File::open(&file.0).unwrap(), length: whole.len() as u64 };
        let read =
            Contents::of_header(&source, None).and_then(|contents| contents.read_values(&source, &mut |_, _| false));
        assert_eq!(read.unwrap_err(), "the file was cut short while it was read");
    }
}
