//! Squares of output pixels that Winograd's algorithm computes together. `winograd` has its arithmetic.

use std::ops::Range;

/// Components of columns that are in a group at most.
pub const GROUP: usize = 2;

/// Which squares of output pixels are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Square {
    /// 2 x 2 pixels. The factors are 1 and 1/2, so little precision is lost.
    Small,
    /// 4 x 4 pixels: 9/16 of the products, and 9/4 of the weights.
    Large,
}

impl Square {
    /// Rows and columns of pixels.
    pub const fn side(self) -> usize {
        match self {
            Square::Small => 2,
            Square::Large => 4,
        }
    }

    /// Components in one dimension.
    pub const fn components(self) -> usize {
        self.side() + 2
    }

    /// Components of columns whose sums come back to the output together: the first, those of each point, the last.
    pub fn groups(self) -> impl Iterator<Item = Range<usize>> {
        let pairs = (1..=self.side()).step_by(2).map(|component| component..component + 2);
        std::iter::once(0..1).chain(pairs).chain(std::iter::once(self.side() + 1..self.side() + 2))
    }
}
