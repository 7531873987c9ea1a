//! An input read as a sequence of small decisions; where it ends, every further decision is 0.

/// What is left of an input.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of it.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Nothing is left to decide.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// One byte.
    pub fn u8(&mut self) -> u8 {
        u8::from_be_bytes(self.array())
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.array())
    }

    /// Four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.array())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.array())
    }

    /// One of a few.
    pub fn pick<'t, T>(&mut self, from: &'t [T]) -> &'t T {
        &from[usize::from(self.u8()) % from.len()]
    }

    /// At most so many bytes as they are.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// What is left, as it is.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}
