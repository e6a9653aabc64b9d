//! Choices that exclude each other. The search asks where a choice could break a line; tests hold plans against the
//! table.

use super::policy::{Form, LayerPolicy, MIN_MATERIALISED_HIDDEN, Memory, Placement};

/// What a layer does, and the facts that decide whether it may.
#[derive(Debug, Clone, Copy)]
pub struct Choices {
    /// What was chosen for the layer.
    pub own: LayerPolicy,
    /// Frames of a whole chunk.
    pub chunk: u64,
    /// Whether it is the first layer of its stage.
    pub is_head: bool,
    /// Whether no stage has more pixels than its own.
    pub is_largest: bool,
    pub keeps_partial_sums: bool,
    /// Whether frames are rematerialised for it.
    pub reads_rematerialised: bool,
    /// Whether its cache is in 8 bits.
    pub rounds: bool,
    pub is_still: bool,
}

/// Two choices that no policy makes together.
#[derive(Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "what they are called, and why, is for docs/planner.md and tests"))]
pub struct Exclusion {
    pub these: [&'static str; 2],
    pub why: &'static str,
    are_made: fn(&Choices) -> bool,
}

pub const EXCLUSIONS: [Exclusion; 9] = [
    Exclusion {
        these: ["bands", "the first layer of a stage"],
        why: "its input frames are queued whole until a chunk is complete",
        are_made: |of| of.own.form == Form::Banded && of.is_head,
    },
    Exclusion {
        these: ["bands", "partial sums"],
        why: "the kernels that keep partial sums read whole frames",
        are_made: |of| of.own.form == Form::Banded && of.keeps_partial_sums,
    },
    Exclusion {
        these: ["whole frames", "a cache that is not resident"],
        why: "a cache is fetched or recomputed band by band",
        are_made: |of| of.own.form == Form::Whole && of.own.cache != Placement::RESIDENT,
    },
    Exclusion {
        these: ["whole frames", "a cache in 8 bits"],
        why: "it is restored band by band; a still has none",
        are_made: |of| of.own.form == Form::Whole && of.rounds && !of.is_still,
    },
    Exclusion {
        these: ["a recomputed cache", "rematerialised inputs"],
        why: "an operation has frames computed again by one layer, for one reason",
        are_made: |of| of.own.cache == Placement::Recomputed && of.reads_rematerialised,
    },
    Exclusion {
        these: ["rematerialised hidden frames", "fewer materialised ones than a cache has"],
        why: "they would read the first layer's cache, which it has already overwritten",
        are_made: |of| {
            !of.is_head && of.own.rematerialised > 0 && of.chunk < of.own.rematerialised + MIN_MATERIALISED_HIDDEN
        },
    },
    Exclusion {
        these: ["rematerialised hidden frames", "a cache in 8 bits"],
        why: "inputs that were read rounded would not be so again",
        are_made: |of| !of.is_head && of.own.rematerialised > 0 && of.rounds,
    },
    Exclusion {
        these: ["an offloaded output", "more than one frame"],
        why: "the caches of its readers are offloaded first, which moves less; only stills have none",
        are_made: |of| of.own.output == Memory::Host && !of.is_still,
    },
    Exclusion {
        these: ["offloaded weights", "the stage with the most pixels"],
        why: "its layers run most often, and would be fetched each time",
        are_made: |of| of.own.weights == Memory::Host && of.is_largest,
    },
];

impl Choices {
    /// With every other fact such that it excludes nothing. Callers set the facts that they ask about.
    pub fn of(own: LayerPolicy) -> Choices {
        Choices {
            own,
            chunk: own.rematerialised + MIN_MATERIALISED_HIDDEN,
            is_head: false,
            is_largest: false,
            keeps_partial_sums: false,
            reads_rematerialised: false,
            rounds: false,
            is_still: true,
        }
    }

    /// The line of the table that they break.
    pub fn exclusion(&self) -> Option<&'static Exclusion> {
        EXCLUSIONS.iter().find(|exclusion| (exclusion.are_made)(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_in_the_documents() {
        let page = include_str!("../../docs/planner.md");
        for Exclusion { these: [one, other], why, .. } in &EXCLUSIONS {
            let line = format!("| {one} | {other} | {why} |");
            assert!(page.contains(&line), "docs/planner.md lacks the line\n{line}");
        }
    }

    #[test]
    fn each_line_excludes_two_choices_that_are_allowed_alone() {
        let whole = LayerPolicy::RESIDENT;
        let banded = whole.banded(Placement::HOST);
        let recomputed = whole.banded(Placement::Recomputed);
        let hidden = LayerPolicy { rematerialised: 1, ..banded };
        let output = LayerPolicy { output: Memory::Host, ..whole };
        let fetched = LayerPolicy { weights: Memory::Host, ..whole };
        let allowed = [whole, banded, recomputed, hidden, output, fetched].map(Choices::of);
        assert!(allowed.iter().all(|choices| choices.exclusion().is_none()));
        let excluded = [
            Choices { is_head: true, ..Choices::of(banded) },
            Choices { keeps_partial_sums: true, ..Choices::of(banded) },
            Choices::of(LayerPolicy { cache: Placement::HOST, ..whole }),
            Choices { rounds: true, is_still: false, ..Choices::of(whole) },
            Choices { reads_rematerialised: true, ..Choices::of(recomputed) },
            Choices { chunk: 2, ..Choices::of(hidden) },
            Choices { rounds: true, ..Choices::of(hidden) },
            Choices { is_still: false, ..Choices::of(output) },
            Choices { is_largest: true, ..Choices::of(fetched) },
        ];
        for (choices, expected) in excluded.iter().zip(&EXCLUSIONS) {
            assert_eq!(choices.exclusion().map(|found| found.these), Some(expected.these));
        }
    }
}
