//! Headers survive writing and reading; damaged and foreign ones are refused.

use std::sync::atomic::AtomicBool;

use super::*;
use crate::checksum::Checksum;
use crate::error::Error;
use crate::exec::state::SealedWriter;

const OWNER: StateOwner = StateOwner { device: "cuda", precision: Precision::Fp16, cache: CacheFormat::Exact };

fn header() -> StateHeader {
    StateHeader {
        model: 0x1234_5678_9abc_def0,
        direction: Direction::Decode,
        input: Shape::new(2, 16, 0, 90, 160),
        numbers: Numbers {
            scaling_factor: 0.9152,
            pixel_range: PixelRange::Unit,
            posterior: Latent::Sample,
            seed: u64::MAX,
        },
        plan: SavedPlan {
            policy: SchedulePolicy {
                slice: 3,
                chunks: vec![1, 8, 4],
                materialised: vec![1, 8, 0],
                materialised_hidden: vec![1, 8, 2],
                caches: vec![
                    CachePolicy::Resident,
                    CachePolicy::HOST,
                    CachePolicy::Recomputed,
                    CachePolicy::Offloaded { resident_shares: 5 },
                    CachePolicy::Offloaded { resident_shares: CachePolicy::SHARES },
                ],
                offloaded_outputs: vec![false; 5],
                offloaded_weights: vec![false, true, false, true, true],
            },
            tiles: Some(TileSize { height: 512, width: 256, overlap: 64, spacing: Spacing::Even }),
        },
        first: 2_999_000,
        loaded: 1_000_000,
    }
}

fn sealed(header: &StateHeader) -> Vec<u8> {
    let (mut state, never) = (Vec::new(), AtomicBool::new(false));
    let mut writer = SealedWriter::new(&mut state, &never);
    writer.write(&header.write(&OWNER)).unwrap();
    writer.seal().unwrap();
    state
}

fn read(state: &[u8], owner: &StateOwner) -> Result<StateHeader> {
    let (mut from, never) = (state, AtomicBool::new(false));
    StateHeader::read(&mut SealedReader::new(&mut from, state.len() as u64, &never), owner)
}

#[test]
fn a_header_is_read_as_it_was_written() {
    let untiled = StateHeader { plan: SavedPlan { tiles: None, ..header().plan }, ..header() };
    for header in [header(), untiled] {
        let state = sealed(&header);
        assert_eq!(read(&state, &OWNER), Ok(header.clone()));
        assert_eq!(header.state_bytes(&OWNER, 1000), state.len() as u64 + 1000 + SEAL);
    }
}

#[test]
fn what_belongs_to_others_is_refused_by_name() {
    let state = sealed(&header());
    for (owner, says) in [
        (StateOwner { device: "cpu", ..OWNER }, "its device is cuda, here it is cpu"),
        (StateOwner { precision: Precision::Bf16, ..OWNER }, "its precision is fp16, here it is bf16"),
        (StateOwner { cache: CacheFormat::U8, ..OWNER }, "its cache is exact, here it is u8; set cache to"),
    ] {
        let why = read(&state, &owner).unwrap_err();
        assert!(matches!(&why, Error::Checkpoint(text) if text.contains(says)), "{why}");
    }
    let mut newer = state.clone();
    newer[8] += 1;
    let why = read(&newer, &OWNER).unwrap_err().to_string();
    assert!(why.contains(&format!("format {}", FORMAT + 1)) && why.contains("start the stream again"), "{why}");
    assert!(
        read(b"{ \"not\": \"a state, but as long as one\" }", &OWNER).unwrap_err().to_string().contains("is not what")
    );
}

/// The state with other bytes in its body, sealed again.
fn resealed(state: &[u8], change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let (mut state, body) = (state.to_vec(), state.len() - SEAL as usize);
    change(&mut state[..body]);
    let sum = Checksum::of(&state[..body]).to_le_bytes();
    state[body..].copy_from_slice(&sum);
    state
}

#[test]
fn a_state_of_another_release_is_taken_if_its_revision_is_the_same() {
    let (state, version) = (sealed(&header()), PREAMBLE as usize + 8..PREAMBLE as usize + 8 + LIBRARY.len());
    let released = resealed(&state, |bytes| bytes[version.clone()].fill(b'9'));
    assert_eq!(read(&released, &OWNER), Ok(header()));
    let revised = resealed(&released, |bytes| bytes[version.end] += 1);
    let why = read(&revised, &OWNER).unwrap_err().to_string();
    let words = ["99999", &format!("revision {}, and {REVISION}", REVISION + 1), LIBRARY, "start the stream again"];
    assert!(words.iter().all(|word| why.contains(word)), "{why}");
}

#[test]
fn a_cancel_ends_reading_and_writing() {
    let (mut state, cancel) = (Vec::new(), AtomicBool::new(true));
    assert_eq!(SealedWriter::new(&mut state, &cancel).write(&[1]), Err(Error::Cancelled));
    let mut from = &sealed(&header())[..];
    assert_eq!(StateHeader::read(&mut SealedReader::new(&mut from, 1000, &cancel), &OWNER), Err(Error::Cancelled));
    assert!(state.is_empty());
}

/// With the checksum made right again, so that it is the reader who has to find out.
#[test]
fn no_header_is_trusted_for_its_checksum() {
    let state = sealed(&header());
    for at in 0..state.len() - SEAL as usize {
        for flip in [1, 0x80, 0xff] {
            let mut flipped = state.clone();
            flipped[at] ^= flip;
            assert!(matches!(read(&flipped, &OWNER), Err(Error::Checkpoint(_))), "{at}");
            let resealed = read(&resealed(&flipped, |_| {}), &OWNER);
            assert!(matches!(resealed, Ok(_) | Err(Error::Checkpoint(_))), "{resealed:?}");
        }
        assert!(read(&state[..at], &OWNER).unwrap_err().to_string().contains("cut short"), "{at}");
    }
}
