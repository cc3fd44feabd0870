package org.ondevice.app

import android.content.ContentProvider
import android.content.ContentValues
import android.content.Context
import android.content.Intent
import android.database.Cursor
import android.database.MatrixCursor
import android.net.Uri
import android.os.ParcelFileDescriptor
import android.provider.OpenableColumns
import java.io.File
import java.io.FileNotFoundException

/**
 * Lends files of the folder `shared` to the app that the user picks in the share sheet: read only, for this one
 * intent (`grantUriPermissions`), and nothing outside the folder. The system's own FileProvider is in androidx.
 */
class ShareProvider : ContentProvider() {
    override fun onCreate() = true

    private fun file(uri: Uri): File {
        val folder = folder(context!!)
        val file = File(folder, uri.lastPathSegment ?: "").canonicalFile
        if (uri.pathSegments.size != 1 || file.parentFile != folder.canonicalFile || !file.isFile) {
            throw FileNotFoundException("no such shared file: $uri")
        }
        return file
    }

    override fun openFile(uri: Uri, mode: String): ParcelFileDescriptor {
        if (mode != "r") throw FileNotFoundException("shared files are for reading; the mode is $mode")
        return ParcelFileDescriptor.open(file(uri), ParcelFileDescriptor.MODE_READ_ONLY)
    }

    override fun query(uri: Uri, columns: Array<String>?, where: String?, values: Array<String>?, order: String?): Cursor {
        val file = file(uri)
        val names = columns ?: arrayOf(OpenableColumns.DISPLAY_NAME, OpenableColumns.SIZE)
        val cursor = MatrixCursor(names)
        cursor.addRow(
            names.map { if (it == OpenableColumns.DISPLAY_NAME) file.name else if (it == OpenableColumns.SIZE) file.length() else null },
        )
        return cursor
    }

    override fun getType(uri: Uri) = type(uri.lastPathSegment ?: "")

    override fun insert(uri: Uri, values: ContentValues?): Uri? = throw UnsupportedOperationException("shared files are for reading")

    override fun update(uri: Uri, values: ContentValues?, where: String?, arguments: Array<String>?): Int =
        throw UnsupportedOperationException("shared files are for reading")

    override fun delete(uri: Uri, where: String?, arguments: Array<String>?): Int =
        throw UnsupportedOperationException("shared files are for reading")

    companion object {
        fun folder(context: Context) = File(context.cacheDir, "shared")

        fun uri(context: Context, file: File): Uri =
            Uri.Builder().scheme("content").authority("${context.packageName}.share").appendPath(file.name).build()

        private fun type(name: String) = if (name.endsWith(".zip")) "application/zip" else "application/octet-stream"

        /** The intent that offers one file of [folder] to other apps. */
        fun intent(context: Context, file: File): Intent {
            val uri = uri(context, file)
            val send = Intent(Intent.ACTION_SEND).apply {
                type = type(file.name)
                putExtra(Intent.EXTRA_STREAM, uri)
                putExtra(Intent.EXTRA_SUBJECT, file.name)
                clipData = android.content.ClipData.newRawUri(file.name, uri)
                addFlags(Intent.FLAG_GRANT_READ_URI_PERMISSION)
            }
            return Intent.createChooser(send, context.getString(R.string.share))
        }
    }
}
