// Not compiled where it was written; see README.md.

import Darwin

/// Memory of this process as the system counts it: what an app is ended for, and what the paper reports (E.2).
public enum Footprint {
    /// `phys_footprint` in bytes; 0 where the kernel does not say.
    public static var bytes: UInt64 {
        var info = task_vm_info_data_t()
        var count = mach_msg_type_number_t(MemoryLayout<task_vm_info_data_t>.size / MemoryLayout<integer_t>.size)
        let status = withUnsafeMutablePointer(to: &info) { pointer in
            pointer.withMemoryRebound(to: integer_t.self, capacity: Int(count)) {
                task_info(mach_task_self_, task_flavor_t(TASK_VM_INFO), $0, &count)
            }
        }
        return status == KERN_SUCCESS ? info.phys_footprint : 0
    }
}
