package org.ondevice.core

import java.io.Closeable
import java.io.File
import java.io.RandomAccessFile
import java.nio.channels.FileLock
import java.nio.channels.OverlappingFileLockException

/** One run a folder: a lock that the kernel releases when its process ends, however it ends. */
internal class RunLock(folder: File) : Closeable {
    private val file: RandomAccessFile
    private val lock: FileLock

    init {
        val path = File(folder, FILE_NAME)
        file = Storage.writing(path) {
            Storage.makeFolder(folder)
            RandomAccessFile(path, "rw")
        }
        val held = try {
            Storage.writing(path) { file.channel.tryLock() }
        } catch (_: OverlappingFileLockException) {
            null
        }
        if (held == null) {
            file.close()
            throw OndeviceException(ErrorKind.BUSY, "another run holds ${folder.name}", "one run at a time", hint = "stop the other run first")
        }
        lock = held
    }

    override fun close() {
        lock.release()
        file.close()
    }

    private companion object {
        const val FILE_NAME = "run.lock"
    }
}
