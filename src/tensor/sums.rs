/// Sums of products that go from one convolution to the next, so that an input frame that both see need not be remembered: they
/// take less where frames shrink. `F` is where something lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sums<F> {
    /// What the sum of the first frame begins with.
    pub before: Option<F>,
    /// What is left for a later frame to begin with.
    pub after: Option<Onward<F>>,
}

/// The product of an input frame and a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Onward<F> {
    pub input: F,
    pub slab: u8,
    /// Where it goes: elsewhere than what the first frame begins with.
    pub sums: F,
}

impl<F> Sums<F> {
    pub const NONE: Sums<F> = Sums { before: None, after: None };

    pub fn is_none(&self) -> bool {
        self.before.is_none() && self.after.is_none()
    }

    /// The same elsewhere.
    pub fn try_map<G, E>(self, find: impl Fn(F) -> Result<G, E>) -> Result<Sums<G>, E> {
        let onward = |onward: Onward<F>| -> Result<Onward<G>, E> {
            Ok(Onward { input: find(onward.input)?, slab: onward.slab, sums: find(onward.sums)? })
        };
        Ok(Sums { before: self.before.map(&find).transpose()?, after: self.after.map(onward).transpose()? })
    }
}
