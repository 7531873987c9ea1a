//! Tables of counters: one place says each counter's name and help, and yields its field, its row and its place among the values.

/// A struct of counters, each a `u64` with its help as documentation, and what reads it: `iter` for people and scripts, and `values`, in the same order, for
/// who copies them often and needs no names.
#[macro_export]
macro_rules! counted {
    ($(#[$of:meta])* pub struct $table:ident { $($(#[doc = $help:literal])+ $name:ident,)+ }) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $table { $($(#[doc = $help])+ pub $name: u64,)+ }

        impl $table {
            const ROWS: &'static [(&'static str, &'static str)] =
                &[$((stringify!($name), concat!($($help),+).trim_ascii())),+];

            /// The value of every counter.
            #[inline]
            pub const fn values(&self) -> [u64; Self::ROWS.len()] {
                [$(self.$name),+]
            }

            /// Name, help text and value of every counter.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> + use<> {
                let rows = Self::ROWS.iter().zip(self.values());
                rows.map(|(&(name, help), value)| (name, help, value))
            }
        }
    };
}
