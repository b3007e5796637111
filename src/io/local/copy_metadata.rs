//! Copies owner, permissions and attributes to a file that replaces another. No user gains access;
//! no user loses access if the system permits that.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};

use crate::sys;

/// The attribute that holds the access control list.
const ACL: &std::ffi::CStr = c"system.posix_acl_access";

/// Gives a file that only its owner can open the owner, group, access control list, labels, user
/// attributes and permissions of another.
///
/// Steps that the system refuses are skipped. The permissions are then restricted, so that the new
/// owner, group and list give no user access without earlier access.
pub(super) fn copy(new: &File, old: &File) -> io::Result<()> {
    let (mut is, was) = (new.metadata()?, old.metadata()?);
    if (is.uid(), is.gid()) != (was.uid(), was.gid()) {
        // Without privileges, the owner cannot be changed, and the group only to one of the
        // process's own groups.
        let _ = fchown(new, Some(was.uid()), Some(was.gid()))
            .or_else(|_| fchown(new, None, Some(was.gid())));
        is = new.metadata()?;
    }
    let mut mode = was.mode() & 0o7777;
    if (is.uid(), is.gid()) != (was.uid(), was.gid()) {
        // A setuid or setgid bit must not give the rights of the wrong user.
        mode &= !0o6000;
    }
    if is.gid() != was.gid() {
        // Members of the old group are now others, and members of the new group were others, so
        // both classes get only the permissions that both had.
        let both = mode >> 3 & mode & 0o7;
        mode = mode & !0o77 | both << 3 | both;
    }
    if copy_acl(new, old).is_err() {
        mode &= !0o77;
    }
    copy_attributes(new, old);
    if new.metadata()?.mode() & 0o7777 != mode {
        new.set_permissions(Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// Copies the access control list; without one the new file has none either, whatever its folder
/// gives to new files.
fn copy_acl(new: &File, old: &File) -> io::Result<()> {
    let acl = sys::attribute(old, ACL)?;
    if acl.is_none() && sys::attribute(new, ACL)?.is_none() {
        return Ok(());
    }
    sys::set_attribute(new, ACL, acl.as_deref())
}

/// Copies attributes that say something about the file, and not about the bytes in it.
fn copy_attributes(new: &File, old: &File) {
    for name in sys::attribute_names(old).unwrap_or(Vec::new()) {
        let text = name.to_bytes();
        let label = matches!(text, b"security.selinux" | b"security.SMACK64");
        if (label || text.starts_with(b"user."))
            && let Ok(Some(value)) = sys::attribute(old, &name)
        {
            // Refused without the privilege, or where there is no room.
            let _ = sys::set_attribute(new, &name, Some(&value));
        }
    }
}
