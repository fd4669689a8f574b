//! placeholder of the first commit; replaced by the branch that builds it.
