package org.ondevice.app

import android.content.ContentResolver
import android.content.Intent
import android.net.Uri
import android.os.Parcelable

/** What an intent brings. Any app may send one, so nothing in it is as expected before it was looked at. */
object Given {
    /** The document that another app shares or opens; null if the intent brings none that the system hands out. */
    @Suppress("DEPRECATION")
    fun document(intent: Intent): Uri? = when (intent.action) {
        Intent.ACTION_VIEW -> content(intent) { it.data }
        Intent.ACTION_SEND -> content(intent) { it.getParcelableExtra<Parcelable>(Intent.EXTRA_STREAM) }
        else -> null
    }

    /** The document or folder that the user picked in another app. */
    fun picked(intent: Intent): Uri? = content(intent) { it.data }

    /** The tab that is asked for, one of [tabs]. */
    fun tab(intent: Intent, otherwise: Int, tabs: IntRange): Int =
        (read(intent) { it.getIntExtra(MainActivity.TAB, otherwise) } ?: otherwise).coerceIn(tabs)

    /** Only what a provider lends: a `file:` URI would have this app read its own private files. */
    private fun content(intent: Intent, reading: (Intent) -> Any?): Uri? =
        (read(intent, reading) as? Uri)?.takeIf { it.scheme == ContentResolver.SCHEME_CONTENT }

    /** Extras of a class that this app does not have make every read of them fail, and so do damaged ones. */
    private fun <T> read(intent: Intent, reading: (Intent) -> T?): T? = try {
        reading(intent)
    } catch (_: RuntimeException) {
        null
    }
}
